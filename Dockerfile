# The controller: no torch, no compiler, any user, read-only root. Ranks install `evenkeel[agent]` instead.
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY service ./service
RUN python -m venv /opt/evenkeel \
 && /opt/evenkeel/bin/pip install --no-cache-dir --no-compile -c constraints.txt .

FROM python:3.11-slim
COPY --from=build /opt/evenkeel /opt/evenkeel
# Writable places are mounts: /data for the embedded store and tokens, /tmp for the kernel cache.
ENV PATH=/opt/evenkeel/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NUMBA_CACHE_DIR=/tmp/numba \
    EVENKEEL_DATA_DIR=/data
USER 65532:0
EXPOSE 8080 9090 50051
ENTRYPOINT ["evenkeel"]
CMD ["serve"]
