# 镜像里有网页、模型权重，以及 llama.cpp 为每一代处理器各编译一份的代码，启动时选最快的。
# The page, the weights, and llama.cpp's code for every generation of processors, of which the start picks the fastest.
#
#   docker build -t qwen-chat .
#   docker run -p 7860:7860 qwen-chat
#
# 构建参数见 README。 The build arguments are explained in the README.

# What everything stands on. A digest makes a build repeatable: --build-arg BASE=python:3.12-slim-trixie@sha256:...
ARG BASE=python:3.12-slim-trixie
# What the weights are quantised to: "cpu" or a type of llama.cpp's; empty: they stay as they are
ARG QUANT

FROM ${BASE} AS base


# The pins of the slow stage, alone and without comments: another change of a lock file leaves its layers valid
FROM base AS pins
WORKDIR /pins
COPY requirements.lock deploy/build.lock /locks/
RUN awk '/^[^ #]/ { file = /^llama-cpp-python==/ ? "engine.lock" : "libraries.lock" } !/^ *#/ { print > file }' \
/locks/requirements.lock \
 && grep -v '^ *#' /locks/build.lock > build.lock


FROM base AS engine
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends cmake g++ ninja-build \
 && rm -rf /var/lib/apt/lists/*
COPY --from=pins /pins/build.lock /pins/engine.lock /
# lean.cmake: what the wheel's build insists on, and nothing here uses: llama.cpp's library for command line programs
RUN pip install --no-cache-dir --require-hashes -r /build.lock \
 && echo 'set(LLAMA_BUILD_COMMON OFF)' > /lean.cmake
# BINDIR: where the variants go; by default into a folder in which nothing looks for them
ENV CMAKE_ARGS="-DCMAKE_PROJECT_INCLUDE=/lean.cmake -DLLAVA_BUILD=OFF \
-DGGML_NATIVE=OFF -DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON \
-DCMAKE_INSTALL_BINDIR=llama_cpp/lib -DCMAKE_INSTALL_LIBDIR=llama_cpp/lib -DCMAKE_INSTALL_INCLUDEDIR=llama_cpp/include"
RUN pip wheel --no-cache-dir --require-hashes --no-deps --no-build-isolation \
--no-binary llama-cpp-python --wheel-dir /wheels -r /engine.lock \
 && dpkg-query --show --showformat '${Package} ${Version} ${Architecture}\n' libgomp1 > /libgomp.txt


# Left out here and in the next stage: headers, tests, Gradio's renderer for Node
FROM base AS libraries
COPY --from=pins /pins/libraries.lock /
RUN pip install --no-cache-dir --no-warn-script-location --require-hashes --no-deps --prefix /env \
--report /report.json -r /libraries.lock
WORKDIR /env/lib/python3.12/site-packages
RUN find . -type d '(' -name tests -o -name include ')' -prune -exec rm -r '{}' + \
 && rm -r gradio/templates/node


FROM libraries AS packages
COPY --from=engine /wheels /wheels
RUN pip install --no-cache-dir --no-warn-script-location --no-index --no-deps --prefix /env /wheels/*.whl
# A wheel has no links, so a library came once for each of its names
RUN rm -r llama_cpp/include llama_cpp/lib/cmake llama_cpp/lib/pkgconfig \
 && for copy in llama_cpp/lib/*.so.*; do name=${copy##*/}; ln -sf "${name%%.so*}.so" "$copy"; done
# OpenMP, beside those that need it
COPY --from=engine /usr/lib/*-linux-gnu/libgomp.so.1.0.0 llama_cpp/lib/libgomp.so.1


# The code that finds the weights, and that which quantises them: what each imports, so that an edit of the rest
# leaves the layers of the weights valid
FROM base AS code
WORKDIR /code
COPY deploy/modules.py .
COPY qwen_chat qwen_chat
RUN python modules.py /weights qwen_chat.weights \
 && python modules.py /quantize qwen_chat.weights qwen_chat.quantize


# The weights, out of models/ or from the hub. A download is kept for the next build, and goes on where it broke off.
FROM base AS weights
COPY --from=libraries /env /usr/local
WORKDIR /bake
COPY --from=code /weights .
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


# Only built where QUANT is given
FROM base AS weights-quantized
COPY --from=packages /env /usr/local
COPY --from=weights /baked /source
WORKDIR /bake
COPY --from=code /quantize .
COPY deploy/bake.py ./
ARG QUANT
RUN PYTHONPATH=. python bake.py --quantize "$QUANT" /source /baked

# hadolint ignore=DL3006
FROM weights${QUANT:+-quantized} AS baked


FROM base AS app
WORKDIR /app
COPY app.py config.yaml ./
COPY qwen_chat qwen_chat
RUN python -m compileall -q qwen_chat && chmod -R a+rX .


# What is in the image, as a CycloneDX file: Python's and Debian's packages, llama.cpp, the weights
FROM base AS sbom
COPY --from=packages /env /env
COPY --from=packages /report.json /
COPY --from=engine /engine.lock /libgomp.txt /
COPY --from=baked /baked /app
COPY qwen_chat/__init__.py /qwen_chat/
COPY deploy/sbom.py /
RUN python -B /sbom.py /sbom.cdx.json


FROM base
LABEL org.opencontainers.image.title="qwen-chat" \
      org.opencontainers.image.description="A very fast chat bot on ordinary CPUs, weights inside" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=baked /baked /app
COPY --from=packages /env /usr/local
# The import leaves behind compiled files and stubs that every start would make again, as none can be kept
RUN useradd --create-home --uid 1000 user \
 && install --directory --owner user --group user /home/user/.cache \
 && python -B -m pip check \
 && python -B -m pip uninstall --yes --quiet --root-user-action=ignore pip \
 && python -c "import runpy, gradio, llama_cpp"
COPY --from=app /app /app
COPY --from=sbom /sbom.cdx.json /app/
WORKDIR /app
USER 1000
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
EXPOSE 7860
# With Docker 25 or newer, `docker run --health-start-interval 1s` sees sooner that it is ready. That flag is not
# here, as builders from before Docker 25 refuse it.
HEALTHCHECK --interval=5s --timeout=5s --start-period=5m CMD ["python", "-m", "qwen_chat.health"]
# Python is process 1 and takes signals itself (app.py); it starts no processes of its own that could be orphaned
CMD ["python", "app.py"]
