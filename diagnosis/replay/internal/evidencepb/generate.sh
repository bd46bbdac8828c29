#!/bin/sh
# Generates evidence.pb.go with the plugin that tools/go.mod pins. Needs protoc
# (Debian: protobuf-compiler) and go.
set -eu
cd "$(dirname "$0")"
root=../../../..
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
(cd $root/tools && GOBIN=$bin go install google.golang.org/protobuf/cmd/protoc-gen-go)
PATH=$bin:$PATH protoc --go_out=. --go_opt=paths=source_relative evidence.proto
