"""A very fast chat bot on ordinary CPUs: llama.cpp behind a Gradio page, one YAML file for the settings."""

import os

__version__ = "0.1.0"

# llama.cpp's threads meet hundreds of times a token. Where they spin while they wait, as OpenMP has it by
# default, any other busy program on the machine takes them apart: 25 tokens/s became 0.2 on two busy cores,
# and stayed 25 with threads that sleep. OpenMP reads this when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
