"""Stands in for `sglang.launch_server` in tests of what starts, asks and stops servers. Answers as the oracle would.

A prefill stub leaves what it "sent" (its fault, if any) in a file per bootstrap room beside the dump folders, from
where the decode stub takes it. Environment: STUB_DIES=boot|request ends it with a traceback, STUB_DEAF=1 never gets
healthy, STUB_CHILD=1 starts a child in the same process group.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from sglang_dspark_cp.smoke.checkpoint import read_checkpoint_info

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--model-path")
parser.add_argument("--disaggregation-mode", default="null")
parser.add_argument("--speculative-algorithm")
ARGS, _ = parser.parse_known_args()
INFO = read_checkpoint_info(ARGS.model_path) if ARGS.model_path else None
DUMP = Path(os.environ.get("SGLANG_DSPARK_CP_DUMP_DIR", "."))
STOCK = os.environ.get("SGLANG_DSPARK_CP") == "0" and "NCCL_DEBUG_FILE" in os.environ
FAULT = os.environ.get("SGLANG_DSPARK_CP_FAULT", "")
PROOF = os.environ.get("SGLANG_DSPARK_CP_ALIGN", "rows") != "off"
SENT = Path(os.environ["NCCL_DEBUG_FILE"]).parent / "dump" if STOCK else DUMP.parent
"""Where prefill stubs leave what decode stubs take."""
served = 0


def die() -> None:
    print("[2026-01-01 TP0] Scheduler hit an exception: Traceback (most recent call last):", flush=True)
    print('  File "stub", line 1, in run\n    raise ValueError("stub was told to die")', flush=True)
    print("ValueError: stub was told to die\n[2026-01-01] more noise", flush=True)
    os._exit(3)


def nccl(log: str) -> None:
    """What two ranks of a prefill worker would log: stock gathers more, and one rank's own calls are no traffic."""
    counts = [1024, 2048, 1536] if STOCK else [1536]
    calls = [("AllReduce", 7, 2), ("AllGather", 99, 1), *(("AllGather", count, 2) for count in counts)]
    for rank in ("1", "2"):
        with Path(log.replace("%h", "host").replace("%p", rank)).open("a") as out:
            for call, count, ranks in calls:
                print(f"h:1:1 [0] NCCL INFO {call}: opCount 5 count {count} datatype 9 op 0 [nranks={ranks}]", file=out)


def rows(role: str, room: int, length: int, fill: int) -> None:
    start = max(0, length - 128)
    positions = np.arange(start, length)
    data = np.full((3, len(positions), 583), fill, np.uint8)
    np.savez(DUMP / f"rows-{role}-{room}.npz", window=(start, length), positions=positions, data=data)


def answer(body: dict[str, Any]) -> dict[str, Any]:
    global served
    prompt = body["input_ids"]
    count = body["sampling_params"]["max_new_tokens"]
    room = body.get("bootstrap_room")
    if os.environ.get("STUB_DIES") == "request":
        die()
    if body.get("return_logprob"):
        tail = [[0.0, token, None] for token in prompt]
        return {
            "output_ids": [9],
            "meta_info": {"input_token_logprobs": tail, "input_top_logprobs": [[x] for x in tail]},
        }
    wrong = bool(FAULT) and not (PROOF and served)
    if ARGS.disaggregation_mode == "prefill":
        served += 1
        log = os.environ.get("NCCL_DEBUG_FILE")
        if log and served == 1:
            loaded = "Load weight end. elapsed=1 s, type=DeepseekV4ForCausalLMDSpark, mem usage="
            print(f"[2026-01-01 TP0] {loaded}0.04 GB.\n[2026-01-01 TP1] {loaded}0.05 GB.", flush=True)
        if log and (served == 1 or (len(prompt) == 512 and count == 1)):
            nccl(log)  # the first is before the chunk that counts
        sent = SENT / f"stub-{room}.json"
        sent.with_suffix(".part").write_text(json.dumps({"wrong": wrong, "refused": wrong and PROOF}))
        sent.with_suffix(".part").replace(sent)  # the decode stub reads it as soon as it is there
        if wrong and PROOF:
            print("AlignmentError on attn_cp_rank 0: x\nAlignmentError on attn_cp_rank 1: x", flush=True)
            return {"error": {"message": "AlignmentError: stub rows"}}
        if STOCK:
            return {"output_ids": [1], "meta_info": {}}
        rows("prefill", room, len(prompt), 60)
        counters = {"cp_forwards": 2, "aux_collectives": 2, "alignment_failures": 0, "requests_refused": 0}
        (DUMP / "counters-0.json").write_text(json.dumps({"counters": counters}))
    if ARGS.disaggregation_mode == "decode":
        sent = SENT / f"stub-{room}.json"
        while not sent.exists():
            time.sleep(0.01)
        time.sleep(0.02)
        state = json.loads(sent.read_text())
        wrong = state["wrong"]
        if state["refused"]:
            return {"error": {"message": "Decode transfer failed"}}
        rows("decode", room, len(prompt), 61 if wrong else 60)
        with (DUMP / "proposals-decode-0.jsonl").open("a") as log:
            tokens = [1, 2, 3, room % 7] if wrong else [1, 2, 3, 4]
            log.write(json.dumps({"room": room, "anchor": len(prompt), "tokens": tokens}) + "\n")
    period = INFO.period if INFO else None
    known = period is not None and INFO is not None and len(prompt) >= period
    tokens = INFO.expected_continuation(prompt, count) if known else [9] * count
    meta: dict[str, Any] = {"finish_reason": {"type": "length"}}
    if ARGS.speculative_algorithm:
        meta["spec_accept_length"] = 1.0 if wrong else 5.0
    return {"output_ids": tokens, "meta_info": meta}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def log_message(self, *args: Any) -> None: ...

    def reply(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self.reply(b"", 503 if os.environ.get("STUB_DEAF") else 200)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/generate":
            return self.reply(b"done")
        if body.get("hang"):
            time.sleep(300)
        found = answer(body)
        if not body.get("stream"):
            return self.reply(json.dumps(found).encode(), 400 if "error" in found else 200)
        self.send_response(200)
        self.end_headers()
        if "output_ids" in found:
            first = {"output_ids": found["output_ids"][:1], "meta_info": {"finish_reason": None}}
            self.wfile.write(b"data: " + json.dumps(first).encode() + b"\n\n")
            self.wfile.flush()
        self.wfile.write(b"data: " + json.dumps(found).encode() + b"\n\ndata: [DONE]\n\n")


class Stub(ThreadingHTTPServer):
    request_queue_size = 128  # many requests at once, on a busy machine


if __name__ == "__main__":
    if os.environ.get("STUB_DIES") == "boot":
        die()
    if os.environ.get("STUB_CHILD"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("stub serves", flush=True)
    Stub(("127.0.0.1", ARGS.port), Handler).serve_forever()
