"""The tools: python -m qwen_chat <tool>."""

import argparse
import importlib
import sys

from . import folders, interrupt, streams

# Each is a module of this package with add_options(parser) and run(options) -> exit status.
TOOLS = {
    "info": "tell what this device grants and what config.yaml comes to on it, nothing is fetched or loaded",
    "bench": "measure this machine: first token, tokens/s, memory, each beside its target",
    "tune": "find the settings with which this machine answers fastest, and put them into config.yaml",
    "convert": "make a quantised file from a Hugging Face model (safetensors)",
    "quantize": "make the weights smaller and faster: any of llama.cpp's types, or a mix made for CPUs",
    "quality": "compare quantisations: perplexity, divergence, size and speed",
}
INTERRUPTED = 130  # as shells have it: 128 + SIGINT


def main(arguments: list[str]) -> int:
    from .weights import WeightsError

    parser = argparse.ArgumentParser(prog="python -m qwen_chat", description="Tools of the chat bot. CONFIG=/path/file.yaml names another config.yaml.")
    tools = parser.add_subparsers(dest="tool", metavar="TOOL")
    if not arguments:
        parser.error(f"a tool is needed, one of: {', '.join(TOOLS)}")
    module = None
    for name, summary in TOOLS.items():
        tool = tools.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if arguments[:1] == [name]:  # the others are not imported
            module = importlib.import_module(f".{name}", __package__)
            module.add_options(tool)
    options = parser.parse_args(arguments)  # does not return for an unknown tool
    try:
        return module.run(options)
    except WeightsError as error:
        print(error, file=sys.stderr)
        return 3


def run() -> int:
    interrupt.install()
    streams.make_safe(needed=True)
    folders.make_sure()
    try:
        try:
            return main(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except streams.OutputLost as lost:
        print(lost, end="\n" if str(lost) else "", file=sys.stderr)
        return 1 if str(lost) else 0
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(run())
