# The server's image. VARIANT=cpu runs anywhere, VARIANT=cuda needs an NVIDIA driver on the host. See docs/container.md.
# Built with BuildKit; needs no frontend image. Every RUN that downloads accepts two optional build secrets,
# pip_conf and ca_bundle, for networks with a package mirror or a private certificate authority.

ARG PYTHON_IMAGE=python:3.12.13-slim-trixie
ARG VARIANT=cpu

# ---- dependencies: the largest layer, rebuilt only when the lock changes. pip has a separate environment, so that
# the image contains neither pip nor its cache. What serving never reads is removed (deploy/slim.py).
FROM ${PYTHON_IMAGE} AS dependencies
ARG VARIANT
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /build
RUN --mount=type=secret,id=ca_bundle \
    command -v strip > /dev/null || { apt-get update -qq \
    && apt-get install -qq -y --no-install-recommends binutils && rm -rf /var/lib/apt/lists; }
COPY requirements/torch-cpu.txt requirements/${VARIANT}.txt requirements/
COPY deploy/slim.py deploy/
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf --mount=type=secret,id=ca_bundle \
    python3 -m venv /opt/tools \
    && python3 -m venv --without-pip /opt/expertd \
    && pip="/opt/tools/bin/python -m pip --python /opt/expertd/bin/python" \
    && if [ "${VARIANT}" = cpu ]; then \
        ${pip} install --no-cache-dir --no-compile --no-deps --index-url=${TORCH_CPU_INDEX} -r requirements/torch-cpu.txt; fi \
    && ${pip} install --no-cache-dir --no-compile --require-hashes -r requirements/${VARIANT}.txt \
    && ${pip} check \
    # What compiles the other GPUs' kernels below; the image has its metadata, which names them, and nothing else of it.
    && mkdir /opt/triton \
    && if [ "${VARIANT}" = cuda ]; then cp -r /opt/expertd/lib/python3.*/site-packages/triton /opt/triton; fi \
    && /opt/tools/bin/python deploy/slim.py /opt/expertd/lib/python3.*/site-packages

# ---- wheel: the server itself and the client, whose channels it uses, built with the locked setuptools
FROM dependencies AS wheel
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY src src
COPY service service
COPY kernels kernels
COPY client/pyproject.toml client/README.md client/
COPY client/src client/src
RUN /opt/tools/bin/python -m pip --python /opt/expertd/bin/python \
    wheel --no-deps --no-index --no-build-isolation -w /dist . ./client

# ---- runtime: the Python base and one environment, without a compiler or our pip
# With any other VARIANT, the build fails before it downloads anything: there is no such stage.
FROM ${PYTHON_IMAGE} AS runtime-cpu

FROM ${PYTHON_IMAGE} AS runtime-cuda
# Read by the NVIDIA container runtime, which mounts the driver's libraries from the host.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM runtime-${VARIANT} AS runtime
COPY --from=dependencies /opt/expertd /opt/expertd
COPY configs /etc/expertd/configs
WORKDIR /etc/expertd
# Kernels are compiled here, which needs no GPU, so that no start compiles any. A request makes sure that nothing is
# missing, and leaves the bytecode of the modules that it needs.
ARG VARIANT
ARG TRITON_ARCHS="sm_80 sm_86 sm_89 sm_90 sm_120 sm_121"
RUN --mount=type=bind,from=wheel,target=/mnt --mount=type=bind,source=deploy/try_serve.py,target=/tmp/try_serve.py \
    /mnt/opt/tools/bin/python -m pip --python /opt/expertd/bin/python install \
        --no-cache-dir --no-compile --no-deps --no-index /mnt/dist/*.whl \
    && if [ "${VARIANT}" = cuda ]; then /opt/expertd/bin/expertd kernels --build --bundle --arch sm_90a \
        && for arch in ${TRITON_ARCHS}; do PYTHONPATH=/mnt/opt/triton /opt/expertd/bin/expertd kernels \
            --backend triton --build --bundle --arch "${arch}" || exit 1; done; fi \
    && /opt/expertd/bin/python /tmp/try_serve.py configs/demo.yaml \
    # Any uid may write compiled kernels; the sticky bit protects them from other uids.
    && install -d -m 1777 /var/cache/expertd

ENV PATH=/opt/expertd/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/cache/expertd \
    TMPDIR=/var/cache/expertd \
    EXPERTD_CACHE_DIR=/var/cache/expertd \
    EXPERTD_CONFIG=/etc/expertd/configs/demo.yaml \
    EXPERTD_HOST=0.0.0.0 \
    EXPERTD_PORT=8000
VOLUME /var/cache/expertd
EXPOSE 8000
# Numeric, so that an orchestrator can verify that it is not root.
USER 10001:10001

# http.client rather than urllib, which would use a proxy set in the environment.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 CMD ["/opt/expertd/bin/python", "-c", \
    "import http.client, os, ssl, sys; at = '127.0.0.1', int(os.environ['EXPERTD_PORT']); k = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT); k.check_hostname = False; k.verify_mode = ssl.CERT_NONE; c = http.client.HTTPSConnection(*at, timeout=4, context=k) if os.environ.get('EXPERTD_TLS__CERTIFICATE') else http.client.HTTPConnection(*at, timeout=4); c.request('GET', '/v2/health/ready'); sys.exit(c.getresponse().status != 200)"]

ENTRYPOINT ["expertd"]
CMD ["serve"]

ARG PYTHON_IMAGE
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="expertd" \
      org.opencontainers.image.description="A server for the expert layers of Mixture-of-Experts models (${VARIANT})" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}" \
      org.opencontainers.image.licenses="Apache-2.0"
