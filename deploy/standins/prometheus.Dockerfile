# Stands in for the official Prometheus image where none can be pulled: Debian's package, same entry point and folder.
FROM debian:bookworm-slim
RUN { command -v prometheus >/dev/null \
      || { apt-get update \
           && apt-get install -y --no-install-recommends prometheus \
           && rm -rf /var/lib/apt/lists/*; }; } \
    && install -d -o nobody -g nogroup /prometheus
WORKDIR /prometheus
VOLUME /prometheus
USER nobody
EXPOSE 9090
ENTRYPOINT ["prometheus"]
