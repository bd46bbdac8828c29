#!/bin/sh
# On removal, not on an upgrade: rpm says 0 and dpkg "remove".
set -e
case "${1:-}" in 0 | remove) ;; *) exit 0 ;; esac
if [ -d /run/systemd/system ]; then
  systemctl disable --now lockstep-agent.service lockstep-remediator.service || true
  systemctl stop 'lockstep-master@*.service' || true
fi
