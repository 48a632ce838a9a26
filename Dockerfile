# The image of the controller. It has no torch and no compiler, and runs as any user with a
# read-only root. Ranks install `evenkeel-moe[rank]` instead.
#
#   docker build -t evenkeel .
#   docker run --rm --read-only --user 12345:0 --cap-drop ALL \
#     --tmpfs /tmp --tmpfs /data:mode=1777 evenkeel
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml setup.py requirements.txt README.md LICENSE ./
COPY deploy/runbook_pages.py ./deploy/
COPY docs/runbooks ./docs/runbooks
COPY service ./service
# Modules are compiled here, because with a read-only root every process would have to compile them
# again. pip is not part of the image. The wheel is for engines' pods that install the plugin into a
# volume: deploy/examples/patches.
RUN python -m venv /opt/evenkeel \
 && /opt/evenkeel/bin/pip install --no-cache-dir --no-deps --require-hashes -r requirements.txt \
 && /opt/evenkeel/bin/pip install --no-cache-dir --no-deps . \
 && /opt/evenkeel/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /opt/evenkeel/wheels . \
 && /opt/evenkeel/bin/pip uninstall --yes pip setuptools \
 && /opt/evenkeel/bin/python -c "import importlib.util as u; assert u.find_spec('torch') is None"

FROM python:3.11-slim
LABEL org.opencontainers.image.title="evenkeel" \
      org.opencontainers.image.description="Balances experts across GPUs for expert-parallel MoE serving." \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/evenkeel /opt/evenkeel
# Writable folders are mounts: /data for the embedded store and tokens, /tmp for the kernel cache. A
# new volume takes the folder's group and mode, so that any user in group 0 may write.
RUN mkdir /data && chgrp 0 /data && chmod 2770 /data
ENV PATH=/opt/evenkeel/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    NUMBA_CACHE_DIR=/tmp/numba \
    EVENKEEL_DATA_DIR=/data
WORKDIR /tmp
USER 65532:0
EXPOSE 8080 9090 50051
STOPSIGNAL SIGTERM
ENTRYPOINT ["evenkeel"]
CMD ["serve"]
