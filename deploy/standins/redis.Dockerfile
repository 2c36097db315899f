# Stands in for the official Redis image where none can be pulled: Debian's package, same user, same data folder.
FROM debian:bookworm-slim
RUN { command -v redis-server >/dev/null \
      || { apt-get update \
           && apt-get install -y --no-install-recommends redis-server \
           && rm -rf /var/lib/apt/lists/*; }; } \
    && install -d -o redis -g redis /data
WORKDIR /data
VOLUME /data
USER redis
EXPOSE 6379
CMD ["redis-server"]
