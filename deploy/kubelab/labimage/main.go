// Command labimage is the one static binary in the images of deploy/kubelab, and the tool
// that packs it as images without a registry.
//
//	labimage pack OUT.tar NAME...   writes a docker-archive (for ctr -n k8s.io images import) with this binary as /lab:
//	                                one image, every NAME a tag of it
//	lab pause                       waits for SIGTERM
//	lab task                        a rank that computes nothing: every 20 ms it appends a line with the time, its attempt and
//	                                node to $LAB_OUT/rank-$RANK, as a checkpoint is written to a file system that all
//	                                nodes share; ends with 143 on SIGTERM
//	lab exit N                      ends with status N
package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"
)

func main() {
	if len(os.Args) < 2 {
		os.Args = append(os.Args, "pause")
	}
	var err error
	switch os.Args[1] {
	case "pause":
		pause()
	case "task":
		err = task()
	case "exit":
		status, _ := strconv.Atoi(os.Args[len(os.Args)-1])
		os.Exit(status)
	case "pack":
		if len(os.Args) < 4 {
			err = fmt.Errorf("pack: want a file and names")
			break
		}
		err = pack(os.Args[2], os.Args[3:])
	default:
		err = fmt.Errorf("unknown command %q", os.Args[1])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "labimage:", err)
		os.Exit(1)
	}
}

// task writes until it is asked to end.
func task() error {
	f, err := os.OpenFile(os.Getenv("LAB_OUT")+"/rank-"+os.Getenv("RANK"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGTERM, syscall.SIGINT)
	t := time.NewTicker(20 * time.Millisecond)
	for {
		select {
		case s := <-c:
			// Not 0: a Job counts a deleted pod that ends with 0 as a completed index, and nothing restarts.
			os.Exit(128 + int(s.(syscall.Signal)))
		case <-t.C:
			if _, err := fmt.Fprintln(f, time.Now().UnixNano(), os.Getenv("ATTEMPT"), os.Getenv("NODE")); err != nil {
				return err
			}
		}
	}
}

// pause is a pod's first process: it reaps, and waits.
func pause() {
	c := make(chan os.Signal, 8)
	signal.Notify(c, syscall.SIGTERM, syscall.SIGINT, syscall.SIGCHLD)
	for s := range c {
		if s != syscall.SIGCHLD {
			os.Exit(0)
		}
		for {
			if p, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); p <= 0 || err != nil {
				break
			}
		}
	}
}

func pack(out string, names []string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	bin, err := os.ReadFile(self)
	if err != nil {
		return err
	}
	epoch := time.Unix(0, 0).UTC()
	var layer bytes.Buffer
	tw := tar.NewWriter(&layer)
	for _, d := range []string{"etc/", "tmp/", "proc/", "dev/", "sys/"} {
		if err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: d, Mode: 0o755, ModTime: epoch}); err != nil {
			return err
		}
	}
	add := func(w *tar.Writer, name string, mode int64, b []byte) error {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(b)), ModTime: epoch}); err != nil {
			return err
		}
		_, err := w.Write(b)
		return err
	}
	if err := add(tw, "etc/passwd", 0o644, []byte("root:x:0:0:root:/:/lab\n")); err != nil {
		return err
	}
	if err := add(tw, "lab", 0o755, bin); err != nil {
		return err
	}
	if err := tw.Close(); err != nil {
		return err
	}
	diff := fmt.Sprintf("sha256:%x", sha256.Sum256(layer.Bytes()))
	cfg, _ := json.Marshal(map[string]any{
		"architecture": "amd64", "os": "linux", "created": epoch,
		"config":  map[string]any{"Entrypoint": []string{"/lab"}, "Cmd": []string{"pause"}, "Env": []string{"PATH=/"}},
		"rootfs":  map[string]any{"type": "layers", "diff_ids": []string{diff}},
		"history": []any{map[string]any{"created": epoch}},
	})
	cfgName := fmt.Sprintf("%x.json", sha256.Sum256(cfg))
	man, _ := json.Marshal([]any{map[string]any{"Config": cfgName, "RepoTags": names, "Layers": []string{"layer.tar"}}})
	f, err := os.Create(out)
	if err != nil {
		return err
	}
	ow := tar.NewWriter(f)
	for _, e := range []struct {
		n string
		b []byte
	}{{cfgName, cfg}, {"layer.tar", layer.Bytes()}, {"manifest.json", man}} {
		if err := add(ow, e.n, 0o644, e.b); err != nil {
			return err
		}
	}
	if err := ow.Close(); err != nil {
		return err
	}
	return f.Close()
}
