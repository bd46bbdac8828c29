package ebpf

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -cc clang-19 -no-strip -target amd64,arm64 -type comm_key -type comm -type call -type end -type stat -cflags "-O2 -g -mcpu=v3 -Wall -Wextra -Wno-unused-parameter -Werror" calls bpf/calls.bpf.c
//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -cc clang-19 -no-strip -target amd64,arm64 -type watched -type away -type sum_key -type sum -type connection -cflags "-O2 -g -mcpu=v3 -Wall -Wextra -Wno-unused-parameter -Werror" waits bpf/waits.bpf.c
//go:generate go run ./internal/strip calls_x86_bpfel.o calls_arm64_bpfel.o waits_x86_bpfel.o waits_arm64_bpfel.o
