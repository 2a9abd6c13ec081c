"""The tools: python -m qwen_chat <tool>."""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it without a traceback while Python still reads its own modules

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


def main(arguments: list[str]) -> int:
    """Runs a tool and returns its exit status: its own, 3 to 5 as app.py has them, 1 where the system refuses something."""
    from .cpu_code import CpuCodeError
    from .weights import UnusableWeights, WeightsError

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
    interrupt.check()  # importing takes a while
    try:
        return module.run(options)
    except WeightsError as error:
        interrupt.check()
        print(error, file=sys.stderr)
        return 4 if isinstance(error, UnusableWeights) else 3
    except CpuCodeError as error:
        print(error, file=sys.stderr)
        return 5
    except OSError as error:
        interrupt.check()
        print(f"{options.tool}: {refusal(error)}", file=sys.stderr)
        return 1


def refusal(error: OSError) -> str:
    """What the system would not do, such as "x.json: No space left on device"."""
    return f"{error.filename or 'the system says'}: {error.strerror or error}"


def run() -> int:
    """What `python -m qwen_chat` does."""
    streams.make_safe(needed=True)
    folders.make_sure()
    interrupt.end_at_once(interrupt.SIGNALS, interrupt.STATUS)  # while nothing runs, or nothing any more
    try:
        return interrupt.run(_all)
    except streams.OutputLost as lost:
        print(lost, end="\n" if str(lost) else "", file=sys.stderr)
        return 1 if str(lost) else 0


def _all() -> int:
    try:
        return main(sys.argv[1:])
    finally:
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run())
