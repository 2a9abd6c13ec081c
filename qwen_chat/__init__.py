"""A very fast chat bot on ordinary CPUs: llama.cpp behind a Gradio page, one YAML file for the settings."""

import os

__version__ = "0.1.0"

# llama.cpp's threads meet hundreds of times a token, and OpenMP has them spin while they wait: for so long
# that on a machine with other busy programs 25 tokens/s became 0.2. Sleeping at once holds the 25 there, but
# halves the speed of a quiet machine. Spinning for a few microseconds first costs neither (measured on two
# cores). OpenMP reads this when it is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
# The hub's client would tell what this program runs with and under, and fetch a list for that from huggingface.co,
# also where config.yaml names only a mirror. It reads this when it is imported.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
