package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// ncclCall measures what the NCCL profiler plugin adds to a collective's call and to
// the proxy thread for its kernel of four channels, as the conformance driver calls it.
func ncclCall() ([]row, error) {
	root, err := rootModule()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(sharedMemory(), "budgets-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	flags := []string{"-std=gnu11", "-O2", "-I" + filepath.Join(root, "record/c"), "-I" + filepath.Join(root, "marks/c")}
	for folder, more := range map[string][]string{"plugin": {"-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-z,nodelete,-z,now"}, "driver": nil} {
		files, err := filepath.Glob(filepath.Join(root, "nccl", folder, "*.c"))
		if err != nil {
			return nil, err
		}
		args := append(append(append(append([]string{}, flags...), more...), "-o", filepath.Join(dir, folder)), append(files, "-lpthread", "-ldl")...)
		if out, err := exec.Command("cc", args...).CombinedOutput(); err != nil {
			return nil, fmt.Errorf("cc %s: %w: %s", folder, err, out)
		}
	}
	var call, proxy float64
	for range rounds {
		cmd := exec.Command(filepath.Join(dir, "driver"), filepath.Join(dir, "plugin"), "5", "bench")
		cmd.Env = append(os.Environ(), "LOCKSTEP_RUNTIME_DIR="+dir)
		out, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("driver: %w", err)
		}
		for _, line := range strings.Split(string(out), "\n") {
			var channels int
			var c, p, e float64
			if n, _ := fmt.Sscanf(line, "channels=%d caller_ns=%g proxy_ns=%g event_ns=%g", &channels, &c, &p, &e); n == 4 && channels == 4 {
				if call == 0 || c < call {
					call = c
				}
				if proxy == 0 || p < proxy {
					proxy = p
				}
			}
		}
	}
	if call == 0 {
		return nil, fmt.Errorf("the driver measured nothing")
	}
	return []row{{"nccl_plugin_call", call, "ns", 150}, {"nccl_plugin_kernel", proxy, "ns", 600}}, nil
}
