#!/bin/sh
# Generates *.pb.go with the plugins that
# tools/go.mod pins. Needs protoc (Debian: protobuf-compiler) and go.
set -eu
cd "$(dirname "$0")"
root=../../..
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
(cd $root/tools && GOBIN=$bin go install google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc)
PATH=$bin:$PATH protoc --go_out=. --go_opt=paths=source_relative \
	--go-grpc_out=. --go-grpc_opt=paths=source_relative plan.proto
