# The gateway and the simulated engine in one image: `forebay serve` by default, `forebay simulate` by another command.
#
#   docker build -t forebay .
#   docker run --rm -p 127.0.0.1:8000:8000 forebay serve --worker http://10.0.0.5:30000

FROM python:3.12-slim AS build
WORKDIR /src
# Everything by hash: what the gateway runs on into its own environment, and the build tool into one that stays here.
COPY requirements-run.lock requirements.lock ./
RUN python -m venv /opt/forebay \
    && /opt/forebay/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements-run.lock \
    && python -m venv /opt/tools \
    && /opt/tools/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY backends/ backends/
COPY gateway/ gateway/
COPY kv_events/ kv_events/
COPY relay/ relay/
COPY routers/ routers/
COPY simulator/ simulator/
RUN /opt/tools/bin/pip wheel --no-cache-dir --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir /wheels . \
    && /opt/forebay/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps /wheels/*.whl \
    && /opt/forebay/bin/python -m pip uninstall --yes --quiet pip

FROM python:3.12-slim
# The number is fixed, so that the owner of mounted key files can be set to it.
RUN groupadd --system --gid 10001 forebay \
    && useradd --system --uid 10001 --gid forebay --home-dir /nonexistent --no-create-home --shell /usr/sbin/nologin forebay
COPY --from=build /opt/forebay /opt/forebay
# In a container the loopback address reaches nobody; the admin routes stay open to it alone (--admin-allow).
ENV PATH=/opt/forebay/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    FOREBAY_HOST=0.0.0.0
USER 10001:10001
EXPOSE 8000
# Liveness, not readiness: a gateway without ready workers is in order. Not for TLS on this port: then switch it off or
# replace it.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 \
    CMD ["python", "-c", "import http.client as h, os; c = h.HTTPConnection('127.0.0.1', int(os.environ.get('FOREBAY_PORT') or 8000), timeout=4); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
# SIGTERM drains. Give `docker stop` more time than --drain-timeout-s (30 s): docker stop --time 45.
STOPSIGNAL SIGTERM
ENTRYPOINT ["forebay"]
CMD ["serve"]
