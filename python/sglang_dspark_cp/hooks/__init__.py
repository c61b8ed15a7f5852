"""Hooks as data, the check that they still fit the installed SGLang, and their installation."""
