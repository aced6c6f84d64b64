#!/usr/bin/env python3
"""`tilebeam serve` behind llama-server's command line, as run.py's tests call it: what both have in common goes on."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Options with a value that both servers have; the others of llama-server's are left out.
BOTH = ("--host", "--port", "--alias", "--ctx-size", "--parallel", "--temp", "--n-predict", "--api-key", "-ctk", "-ctv")
BOTH += ("--chat-template", "--chat-template-kwargs", "--cors-origins", "--models-max")
OURS = {"--cors-origins": "--cors-origin"}


def main() -> None:
    """Become the server."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for option in (*BOTH, "--model", "--chat-template-file"):
        parser.add_argument(option)
    parser.add_argument("--reasoning")
    parser.add_argument("--embedding", action="store_true")
    parser.add_argument("--reranking", action="store_true")
    given = vars(parser.parse_known_args()[0])
    kind = "reranker" if given["reranking"] else "encoder" if given["embedding"] else "decoder"
    model = given["model"] or Path(os.environ["TILEBEAM_UPSTREAM_MODELS"], f"{kind}.gguf")
    command = [sys.executable, "-m", "tilebeam", "serve", "-m", str(model), "-t", "1"]
    for option in BOTH:
        value = given[option.lstrip("-").replace("-", "_")]
        if option == "--alias":
            value = f"{value or 'tiny'},test"  # as tests of Anthropic's form call it
        if value is not None:
            command += [OURS.get(option, option), value]
    if given["chat_template_file"]:
        command += ["--chat-template", Path(given["chat_template_file"]).read_text()]
    elif not given["chat_template"]:
        command += ["--chat-template", "chatml"]  # as llama-server, where a model has none
    if given["reasoning"] == "off":
        command += ["--chat-template-kwargs", '{"enable_thinking": false}']
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
