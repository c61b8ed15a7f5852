"""Checks of the machine: SGLang and this plugin, Mooncake and its network, GPUs, ports."""

from __future__ import annotations

import functools
import importlib.metadata as metadata
import json
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import adapters, config
from ..config import AlignLevel
from ..core.topology import TRANSFER_BACKENDS
from ..errors import ConfigError
from ..hooks.check import problems, sglang_release, sglang_root
from ..smoke.native import SYSTEM_LIBRARIES
from .doctor_check import Check, Machine, failed, not_checked, passed, warning
from .doctor_resolve import Answer

SGLANG, TRANSFER, GPUS, PORTS = "SGLang", "Transfer", "GPUs", "Ports"
NEWEST = list(adapters.REVIEWED)[-1]
GROUP = "sglang.srt.plugins"
ENTRY = ("dspark_cp", "sglang_dspark_cp.plugin:register")


# ---------------------------------------------------------------------------------------------- SGLang and this plugin


def release_checks(role: str | None, machine: Machine) -> list[Check]:
    """The SGLang release, whether hooks fit it, whether SGLang will load the plugin, this package's variables."""
    found = [*_variables(machine), _switch(role, machine), _entry_point(role, machine)]
    try:
        release = sglang_release()
        root = sglang_root()
    except (metadata.PackageNotFoundError, ModuleNotFoundError):
        missing = failed(
            SGLANG,
            "release",
            "SGLang is not installed in the environment of this command",
            f"SGLang {' or '.join(adapters.REVIEWED)}",
            "the plugin works inside SGLang",
            f"{sys.executable} -m pip install sglang=={NEWEST}",
        )
        return [missing, *found]
    return [*_release(release, root, role, machine), *found]


def _release(release: str, root: Path, role: str | None, machine: Machine) -> list[Check]:
    reviewed, needed = ", ".join(adapters.REVIEWED), role != "decode"
    say = failed if needed else warning
    adapter = adapters.find(release)
    if adapter is None:
        return [
            say(
                SGLANG,
                "release",
                f"SGLang {release}",
                reviewed,
                adapters.refusal(release).rstrip(".") + ", so the feature is refused"
                if needed
                else "the plugin does nothing on decode, but prefill needs a reviewed release, and both should agree",
                f"pip install sglang=={NEWEST}",
            )
        ]
    hooks = (*adapter.EAGER_HOOKS, *adapter.WORKER_HOOKS)
    if machine.environ.get(config.DUMP_DIR, "").strip():
        hooks += adapters.debug_hooks(release)
    found = problems(hooks, root)
    checks = [passed(SGLANG, "release", f"SGLang {release}, reviewed")]
    if not found:
        return [*checks, passed(SGLANG, "hooks", f"all {len(hooks)} hooks fit the installed source")]
    return [
        *checks,
        say(
            SGLANG,
            "hooks",
            f"{len(found)} of {len(hooks)} hooks do not fit: " + "; ".join(map(str, found)),
            "the source that was reviewed",
            "a changed definition is not patched: nothing is, and the feature is refused",
            f"pip install --force-reinstall --no-deps sglang=={release}; sglang-dspark-cp hooks check shows each",
        ),
    ]


def _switch(role: str | None, machine: Machine) -> Check:
    if machine.environ.get(config.ENABLED, "").strip() != "0":
        return passed(SGLANG, "switch", f"{config.ENABLED} is not 0: the plugin is on")
    if role == "decode":
        return passed(SGLANG, "switch", f"{config.ENABLED}=0", "the plugin does nothing on decode anyway")
    return failed(
        SGLANG,
        "switch",
        f"{config.ENABLED}=0",
        "unset or 1",
        "without the plugin stock SGLang refuses DSPARK on CP prefill",
        f"unset {config.ENABLED}",
    )


def _entry_point(role: str | None, machine: Machine) -> Check:
    name, value = ENTRY
    here = [entry for entry in metadata.entry_points(group=GROUP) if entry.name == name]
    chosen = [part.strip() for part in machine.environ.get("SGLANG_PLUGINS", "").split(",") if part.strip()]
    if any(entry.value == value for entry in here) and (not chosen or name in chosen):
        return passed(SGLANG, "entry point", f"{name} = {value} in group {GROUP}")
    if role == "decode":
        return passed(SGLANG, "entry point", f"{name} is not loaded", "the plugin does nothing on decode anyway")
    if here and chosen:
        return failed(
            SGLANG,
            "entry point",
            f"SGLANG_PLUGINS={machine.environ['SGLANG_PLUGINS']}",
            f"unset, or a list with {name}",
            "SGLang loads no other plugin than those it names",
            f"SGLANG_PLUGINS={','.join([*chosen, name])}",
        )
    return failed(
        SGLANG,
        "entry point",
        f"group {GROUP} has {', '.join(f'{entry.name} = {entry.value}' for entry in here) or f'no {name}'}",
        f"{name} = {value}",
        "SGLang finds plugins by the entry points of installed packages",
        f"{sys.executable} -m pip install sglang-dspark-cp (a checkout: pip install -e .)",
    )


def _variables(machine: Machine) -> list[Check]:
    try:
        settings = config.from_environment(machine.environ)
    except ConfigError as error:
        return [
            failed(
                SGLANG,
                "variables",
                str(error),
                "the values in the README",
                "the server stops at once",
                f"unset {str(error).split('=')[0]}",
            )
        ]
    given = [name for name in config.NAMES if machine.environ.get(name, "").strip()]
    text = ", ".join(f"{name}={machine.environ[name]}" for name in given) or "none is set, defaults apply"
    doubts = [
        *([f"{config.FAULT} spoils draft rows on purpose"] if settings.fault else []),
        *([f"{config.DUMP_DIR} writes files with every request"] if settings.dump_dir else []),
        *([f"{config.ALIGN}=off drops the proof"] if settings.align is AlignLevel.OFF else []),
    ]
    if doubts:
        names = [name for name in (config.FAULT, config.DUMP_DIR, config.ALIGN) if any(name in each for each in doubts)]
        return [warning(SGLANG, "variables", text, "unset to serve", "; ".join(doubts), f"unset {' '.join(names)}")]
    return [passed(SGLANG, "variables", text)]


# ------------------------------------------------------------------------------------------------------------- Mooncake


def transfer_checks(role: str | None, answer: Answer, machine: Machine) -> list[Check]:
    """Mooncake, its transport and devices."""
    backend = answer.raw.get("disaggregation_transfer_backend")
    if backend is not None and backend not in TRANSFER_BACKENDS:
        return [
            failed(
                TRANSFER,
                "backend",
                f"--disaggregation-transfer-backend {backend}",
                " or ".join(TRANSFER_BACKENDS),
                "draft KV of a CP prefill worker travels over Mooncake, and both sides need the same backend",
                "--disaggregation-transfer-backend mooncake",
            )
        ]
    environ = {**machine.environ, **answer.environment}
    tcp_backend = backend == "mooncake_tcp"
    devices = rdma_devices(machine)
    named = answer.raw.get("disaggregation_ib_device")
    found = [_import_mooncake(machine), _transport(tcp_backend, environ, devices, bool(named))]
    if named is not None:
        found.append(_named_devices(str(named), devices, tcp_backend))
    return [*found, _interfaces(machine)]


def _import_mooncake(machine: Machine) -> Check:
    done = machine.command([sys.executable, "-c", "import mooncake.engine"])
    package = mooncake_package()
    if done is not None and done.status == 0:
        release = metadata.version(package) if package else "of unknown version"
        return passed(TRANSFER, "mooncake", f"mooncake.engine imports, {package or 'mooncake'} {release}")
    error = "no answer" if done is None else (done.error.strip().splitlines() or [f"status {done.status}"])[-1]
    library = re.search(r"(\S+\.so[.\d]*): cannot open", error)
    if package is None:
        fix = f"{sys.executable} -m pip install mooncake-transfer-engine-cuda13 (or the wheel for your CUDA)"
    elif library is None:
        fix = f"{sys.executable} -m pip install --force-reinstall --no-deps {package}"
    elif library[1] in SYSTEM_LIBRARIES:
        fix = f"apt-get install {SYSTEM_LIBRARIES[library[1]]}"
    elif library[1].startswith("libcuda."):
        fix = "install the NVIDIA driver, or start the container with GPUs"
    else:
        fix = f"install what provides {library[1]}; a Mooncake wheel for another CUDA release may need none"
    return failed(
        TRANSFER,
        "mooncake",
        error,
        "import mooncake.engine works",
        "KV and draft KV travel over Mooncake on both sides",
        fix,
    )


@functools.cache
def mooncake_package() -> str | None:
    """The distribution that Mooncake is from; there is one for each CUDA release."""
    return next(iter(metadata.packages_distributions().get("mooncake", ())), None)


def rdma_devices(machine: Machine) -> dict[str, bool]:
    """RDMA device -> whether one of its ports has an active link."""
    where = ("class", "infiniband")
    return {
        name: any(
            machine.read(*where, name, "ports", port, "state").endswith("ACTIVE")
            for port in machine.names(*where, name, "ports")
        )
        for name in machine.names(*where)
    }


def _device_text(devices: Mapping[str, bool]) -> str:
    listed = ", ".join(f"{name} ({'active' if active else 'down'})" for name, active in devices.items())
    return listed or "no RDMA device under /sys/class/infiniband"


def _transport(tcp_backend: bool, environ: Mapping[str, str], devices: Mapping[str, bool], named: bool) -> Check:
    """Mooncake takes RDMA when it finds a device and MC_FORCE_TCP is not set, whatever its value; else TCP."""
    protocol = environ.get("MOONCAKE_PROTOCOL", "").strip() or "rdma"
    forced = "MC_FORCE_TCP" in environ
    both = "prefill and decode must use the same transport"
    ways = "--disaggregation-transfer-backend mooncake_tcp or MC_FORCE_TCP=1, on both sides"
    if forced and environ["MC_FORCE_TCP"] != "1":
        return warning(
            TRANSFER,
            "transport",
            f"MC_FORCE_TCP={environ['MC_FORCE_TCP']!r}",
            "MC_FORCE_TCP=1 or unset",
            "Mooncake takes TCP as soon as it is set, SGLang only when it is 1",
            "unset MC_FORCE_TCP, or MC_FORCE_TCP=1",
        )
    if forced or tcp_backend:
        how = "--disaggregation-transfer-backend mooncake_tcp" if tcp_backend else "MC_FORCE_TCP=1"
        return passed(TRANSFER, "transport", f"TCP, by {how}", f"{both}; TCP is much slower than RDMA")
    if protocol == "tcp":
        if not devices:
            return passed(TRANSFER, "transport", "TCP, by MOONCAKE_PROTOCOL=tcp", both)
        return warning(
            TRANSFER,
            "transport",
            f"MOONCAKE_PROTOCOL=tcp, and {_device_text(devices)}",
            "MC_FORCE_TCP=1 for TCP",
            "Mooncake chooses by the devices that it finds and may ignore the protocol",
            ways,
        )
    if protocol != "rdma":
        return not_checked(
            TRANSFER, "transport", f"MOONCAKE_PROTOCOL={protocol}", "only rdma and tcp are looked at here"
        )
    if not devices:
        say = failed if environ.get("MC_FORCE_HCA") else warning
        return say(
            TRANSFER,
            "transport",
            _device_text(devices),
            "an RDMA device with an active link, or TCP by choice",
            f"without one Mooncake falls back to TCP without a word, a peer with one does not, and {both}",
            f"{ways}; for RDMA install the drivers (ls /sys/class/infiniband)",
        )
    if not any(devices.values()):
        return failed(
            TRANSFER,
            "transport",
            _device_text(devices),
            "at least one active link",
            "Mooncake takes RDMA because there is a device",
            f"bring a link up (ibstat, ibv_devinfo), or {ways}",
        )
    if not named and not all(devices.values()):
        active = ",".join(name for name, up in devices.items() if up)
        return warning(
            TRANSFER,
            "transport",
            f"RDMA, {_device_text(devices)}",
            "active links only",
            "without names Mooncake discovers devices by itself",
            f"--disaggregation-ib-device {active}",
        )
    return passed(TRANSFER, "transport", f"RDMA, {_device_text(devices)}", both)


def ib_names(text: str) -> list[str]:
    """Device names of a --disaggregation-ib-device value: a list, a JSON mapping per GPU, or a file with one.

    Raises:
        ValueError: it is none of these, or the file cannot be read.
    """
    text = text.strip()
    if not text.endswith(".json") and not text.startswith("{"):
        lists = [text]
    else:
        try:
            mapping = json.loads(Path(text).read_text() if text.endswith(".json") else text)
        except OSError as error:
            raise ValueError(f"{text} cannot be read: {error.strerror}") from None
        if not isinstance(mapping, dict) or not all(isinstance(value, str) for value in mapping.values()):
            raise ValueError(f"{text} is not a JSON object of GPU -> names")
        lists = list(mapping.values())
    names = [name.strip() for each in lists for name in each.split(",")]
    return list(dict.fromkeys(name for name in names if name))


def _named_devices(text: str, devices: Mapping[str, bool], tcp_backend: bool) -> Check:
    name = "--disaggregation-ib-device"
    active = ", ".join(device for device, up in devices.items() if up) or "none here"
    if tcp_backend:
        return warning(
            TRANSFER, name, text, "no device names", "SGLang ignores them with mooncake_tcp", f"leave out {name}"
        )
    try:
        names = ib_names(text)
    except ValueError as error:
        return failed(TRANSFER, name, str(error), "names, or a JSON mapping", "SGLang reads it so", f"{name} mlx5_0")
    wrong = [device for device in names if not devices.get(device)]
    if names and not wrong:
        return passed(TRANSFER, name, ", ".join(names))
    states = [f"{device} ({'link down' if device in devices else 'no such device'})" for device in wrong]
    return failed(
        TRANSFER,
        name,
        ", ".join(states) or "no name",
        active,
        "Mooncake uses these devices and no others",
        f"{name} with names that are active, or leave it out",
    )


def _interfaces(machine: Machine) -> Check:
    up = []
    for name in machine.names("class", "net"):
        state = machine.read("class", "net", name, "operstate")
        if name != "lo" and state in ("up", "unknown"):
            speed = machine.read("class", "net", name, "speed")
            up.append(f"{name} ({speed} Mbit/s)" if speed.isdigit() else name)
    host = machine.environ.get("SGLANG_HOST_IP") or machine.environ.get("HOST_IP")
    text = f"{', '.join(up) or 'none beside loopback'}{f'; address {host} by environment' if host else ''}"
    if up:
        return passed(TRANSFER, "interfaces", text)
    return warning(
        TRANSFER,
        "interfaces",
        text,
        "one that the other side reaches",
        "handshakes, and all data with TCP, go over it; loopback serves one host only",
        "bring an interface up; SGLANG_HOST_IP chooses among several",
    )


# ----------------------------------------------------------------------------------------------------------------- GPUs


def needed_gpus(facts: Mapping[str, Any]) -> int:
    """GPUs of this node that a server takes."""
    ranks = int(facts["tp_size"]) * int(facts["pp_size"])
    if not facts["enable_dp_attention"]:
        ranks *= int(facts["dp_size"])
    return -(-ranks // int(facts["nnodes"]))


def gpu_checks(answer: Answer, machine: Machine) -> list[Check]:
    """How many GPUs there are, how many are needed, how they are linked."""
    listed = _listed_gpus(machine)
    facts = answer.facts
    needed = needed_gpus(facts) if facts else None
    count = len(listed) if answer.gpus is None else answer.gpus
    models = ", ".join(dict.fromkeys(listed)) or "nvidia-smi lists none"
    text = f"{count} visible ({models})"
    if answer.gpus is not None and len(listed) > answer.gpus:
        text += f"; nvidia-smi lists {len(listed)}, torch sees {answer.gpus}"
    if needed is None:
        return [not_checked(GPUS, "number", text, "how many are needed follows from the arguments, see there")]
    last = int(facts["base_gpu_id"]) + (needed - 1) * int(facts["gpu_id_step"]) + 1
    allowed = f"{last} (tp {facts['tp_size']}, dp {facts['dp_size']}, pp {facts['pp_size']}, nodes {facts['nnodes']})"
    if count < last:
        return [
            failed(
                GPUS,
                "number",
                text,
                f"at least {allowed}",
                "one rank, one GPU",
                "CUDA_VISIBLE_DEVICES with more GPUs, or a smaller --tp; if torch sees fewer than nvidia-smi, a driver"
                " for torch's CUDA",
            )
        ]
    found = [passed(GPUS, "number", f"{text}, needed {allowed}")]
    return [*found, *([_links(needed, machine)] if needed > 1 else [])]


def _listed_gpus(machine: Machine) -> list[str]:
    """Names of the GPUs that servers may use, as far as nvidia-smi tells."""
    done = machine.command(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    names = [] if done is None or done.status else [line.strip() for line in done.out.splitlines() if line.strip()]
    visible = machine.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return names
    chosen = [part.strip() for part in visible.split(",") if part.strip()]
    if all(part.isdigit() for part in chosen):
        return [names[int(part)] for part in chosen if int(part) < len(names)]
    return names[: len(chosen)]


def link_matrix(text: str) -> dict[tuple[int, int], str]:
    """(GPU, other GPU) -> kind of link, from `nvidia-smi topo -m`."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in text.splitlines()]
    columns: list[str] = next((line for line in lines if line[:1] == ["GPU0"] and "GPU1" in line), [])
    gpus = [int(name[3:]) for name in columns if re.fullmatch(r"GPU\d+", name)]
    found = {}
    for line in lines:
        row = re.fullmatch(r"GPU(\d+)", line[0]) if line else None
        if row is None or line is columns:
            continue
        for column, kind in zip(gpus, line[1:], strict=False):
            if column != int(row[1]):
                found[int(row[1]), column] = kind
    return found


def _links(needed: int, machine: Machine) -> Check:
    done = machine.command(["nvidia-smi", "topo", "-m"])
    visible = machine.environ.get("CUDA_VISIBLE_DEVICES", "")
    chosen = [part.strip() for part in visible.split(",") if part.strip()]
    indices = set(map(int, chosen)) if chosen and all(part.isdigit() for part in chosen) else set(range(10**6))
    links = {} if done is None or done.status else link_matrix(done.out)
    kinds = [kind for (row, column), kind in links.items() if row < column and {row, column} <= indices]
    if not kinds:
        return not_checked(GPUS, "links", "nvidia-smi topo -m shows no links", "it is how NVLink is looked for")
    text = ", ".join(f"{kinds.count(kind)} pairs {kind}" for kind in dict.fromkeys(kinds))
    if all(kind.startswith("NV") for kind in kinds):
        return passed(GPUS, "links", f"NVLink: {text}")
    return warning(
        GPUS,
        "links",
        text,
        "NVLink (NV*) between all GPUs of a server",
        f"the {needed} ranks exchange data in every forward; over PCIe that is slow",
        "a host with NVLink, or CUDA_VISIBLE_DEVICES with GPUs that have it",
    )


# ---------------------------------------------------------------------------------------------------------------- ports


def port_checks(role: str | None, answer: Answer, flagged: bool) -> list[Check]:
    """HTTP port and, on prefill, the bootstrap port.

    Args:
        role: prefill or decode.
        answer: of SGLang.
        flagged: --disaggregation-bootstrap-port was given.
    """
    port, bootstrap = answer.facts.get("port"), answer.facts.get("disaggregation_bootstrap_port")
    if port is None or bootstrap is None:
        return [not_checked(PORTS, "ports", "the arguments were not read", "ports follow from them")]
    found = [_free("HTTP", int(port), "--port")]
    flag = "--disaggregation-bootstrap-port"
    if role == "decode":
        why = "its bootstrap server runs on prefill hosts"
        return [*found, passed(PORTS, "bootstrap", f"{bootstrap}, not bound on decode", why)]
    if bootstrap == port:
        why, fix = "both servers bind it", f"{flag} {int(port) + 1}"
        return [*found, failed(PORTS, "bootstrap", f"{bootstrap}, the HTTP port too", "another port", why, fix)]
    found.append(_free("bootstrap", int(bootstrap), flag))
    if not flagged:
        found.append(
            warning(
                PORTS,
                flag,
                f"not given, {bootstrap} applies",
                "a port by choice",
                "routers and decode workers must be told the same port; two prefill servers of a host cannot share it",
                f"{flag} {bootstrap}",
            )
        )
    return found


def _free(name: str, port: int, flag: str) -> Check:
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return failed(PORTS, name, f"{port}: {why}", "a free port", "the server binds it", f"{flag} with a free port")
    return passed(PORTS, name, f"{port} is free on loopback")
