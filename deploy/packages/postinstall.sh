#!/bin/sh
# What ran goes on with the new program; jobs do not notice: ranks write their recorders on.
set -e
if [ -d /run/systemd/system ]; then
  systemctl daemon-reload
  systemctl try-restart lockstep-agent.service lockstep-remediator.service 'lockstep-master@*.service' || true
fi
