# 镜像里有网页、模型权重，以及 llama.cpp 为每一代处理器各编译一份的代码，启动时选最快的。
# The page, the weights, and llama.cpp's code for every generation of processors, of which the start picks the fastest.
#
#   docker build -t qwen-chat .
#   docker run -p 7860:7860 qwen-chat
#
# 构建参数见 README。 The build arguments are explained in the README.

# What the weights are quantised to: "cpu" or a type of llama.cpp's; empty: they stay as they are
ARG QUANT


# The pins that the slow stages need, alone: another pin in requirements.txt leaves their layers valid
FROM python:3.12-slim-trixie AS pins
WORKDIR /pins
COPY requirements.txt .
RUN grep '^llama-cpp-python' requirements.txt > engine.txt \
 && grep -E '^(huggingface-hub|pyyaml)' requirements.txt > hub.txt


FROM python:3.12-slim-trixie AS engine
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends cmake g++ ninja-build \
 && rm -rf /var/lib/apt/lists/*
COPY --from=pins /pins/engine.txt /
# What the wheel's build insists on, and nothing here uses: llama.cpp's library for command line programs
RUN echo 'set(LLAMA_BUILD_COMMON OFF)' > /lean.cmake
# BINDIR: where the variants go; by default into a folder in which nothing looks for them
ENV CMAKE_ARGS="-DCMAKE_PROJECT_INCLUDE=/lean.cmake -DLLAVA_BUILD=OFF \
-DGGML_NATIVE=OFF -DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON \
-DCMAKE_INSTALL_BINDIR=llama_cpp/lib -DCMAKE_INSTALL_LIBDIR=llama_cpp/lib -DCMAKE_INSTALL_INCLUDEDIR=llama_cpp/include"
RUN pip wheel --no-cache-dir --no-deps --no-binary llama-cpp-python --wheel-dir /wheels -r /engine.txt


FROM python:3.12-slim-trixie AS packages
COPY --from=engine /wheels /wheels
COPY requirements.txt /
RUN pip install --no-cache-dir --no-warn-script-location --prefix /env /wheels/*.whl -r /requirements.txt
# Left out: headers, tests, Gradio's renderer for Node. A wheel has no links, so a library came once for each of its names.
WORKDIR /env/lib/python3.12/site-packages
RUN find . -type d '(' -name tests -o -name include ')' -prune -exec rm -r '{}' + \
 && rm -r gradio/templates/node llama_cpp/lib/cmake llama_cpp/lib/pkgconfig \
 && for copy in llama_cpp/lib/*.so.*; do name=${copy##*/}; ln -sf "${name%%.so*}.so" "$copy"; done
# OpenMP, beside those that need it
COPY --from=engine /usr/lib/*-linux-gnu/libgomp.so.1.0.0 llama_cpp/lib/libgomp.so.1


# The weights, out of models/ or from the hub. A download is kept for the next build, and goes on where it broke off.
FROM python:3.12-slim-trixie AS weights
COPY --from=pins /pins/hub.txt /
# hadolint ignore=DL3013
RUN pip install --no-cache-dir pydantic -r /hub.txt
WORKDIR /bake
COPY qwen_chat/__init__.py qwen_chat/config.py qwen_chat/folders.py qwen_chat/profiles.py qwen_chat/proxies.py qwen_chat/weights.py qwen_chat/
COPY deploy/bake.py config.yaml ./
COPY config.yaml models/*.gguf /context/
ARG QUANT
ARG MODEL_REPO
ARG MODEL_FILE
ARG MODEL_REVISION
ARG MODEL_SHA256
ARG HF_ENDPOINT
RUN --mount=type=cache,target=/cache --mount=type=secret,id=HF_TOKEN \
    XDG_CACHE_HOME=/cache PYTHONPATH=. python bake.py /context /baked


# Only built where QUANT is given. The code that takes part is listed, so that an edit of the rest does not quantise again.
FROM python:3.12-slim-trixie AS weights-quantized
COPY --from=packages /env /usr/local
COPY --from=weights /baked /source
WORKDIR /bake
COPY qwen_chat/__init__.py qwen_chat/config.py qwen_chat/conversation.py qwen_chat/folders.py qwen_chat/hardware.py qwen_chat/interrupt.py qwen_chat/memory.py \
     qwen_chat/model.py qwen_chat/offline.py qwen_chat/profiles.py qwen_chat/proxies.py qwen_chat/quantize.py qwen_chat/sampling.py \
     qwen_chat/samples.py qwen_chat/weights.py \
     qwen_chat/calibration.yaml qwen_chat/
COPY deploy/bake.py ./
ARG QUANT
RUN PYTHONPATH=. python bake.py --quantize "$QUANT" /source /baked

# hadolint ignore=DL3006
FROM weights${QUANT:+-quantized} AS baked


FROM python:3.12-slim-trixie AS app
WORKDIR /app
COPY app.py config.yaml ./
COPY qwen_chat qwen_chat
RUN python -m compileall -q qwen_chat && chmod -R a+rX .


FROM python:3.12-slim-trixie
LABEL org.opencontainers.image.title="qwen-chat" \
      org.opencontainers.image.description="A very fast chat bot on ordinary CPUs, weights inside" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=baked /baked /app
COPY --from=packages /env /usr/local
# The import leaves behind compiled files and stubs that every start would make again, as none can be kept
RUN useradd --create-home --uid 1000 user \
 && install --directory --owner user --group user /home/user/.cache \
 && python -B -m pip uninstall --yes --quiet --root-user-action=ignore pip \
 && python -c "import runpy, gradio, llama_cpp"
COPY --from=app /app /app
WORKDIR /app
USER 1000
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
EXPOSE 7860
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m CMD ["python", "-m", "qwen_chat.health"]
# Python is process 1 and takes signals itself (app.py); it starts no processes of its own that could be orphaned
CMD ["python", "app.py"]
