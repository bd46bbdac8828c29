#!/bin/sh
# The account that master and remediator run as. Nothing is started.
set -e
getent group lockstep >/dev/null || groupadd --system lockstep
getent passwd lockstep >/dev/null || useradd --system --gid lockstep --home-dir /var/lib/lockstep --no-create-home --shell /usr/sbin/nologin lockstep
