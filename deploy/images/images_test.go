package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// archive writes one as deploy/release does.
func archive(t *testing.T, dir, name string, files map[string]string) {
	t.Helper()
	var packed []file
	for n, text := range files {
		packed = append(packed, file{name: "lockstep/" + n, mode: 0o755, data: []byte(text)})
	}
	plain, err := pack(withParents(packed), time.Unix(1_700_000_000, 0))
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	if _, err := z.Write(plain); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name), out.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
}

func untar(t *testing.T, b []byte) map[string]tarred {
	t.Helper()
	m := map[string]tarred{}
	for r := tar.NewReader(bytes.NewReader(b)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return m
		} else if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		m[h.Name] = tarred{*h, data}
	}
}

type tarred struct {
	tar.Header
	data []byte
}

// TestImages packs a release, reads the layout as a registry's client would, following
// digests, and packs it again elsewhere: the same bytes.
func TestImages(t *testing.T) {
	var made [2][]byte
	for i := range made {
		from, out := t.TempDir(), t.TempDir()
		for _, arch := range []string{"amd64", "arm64"} {
			archive(t, from, "lockstep_1.2.3_linux_"+arch+".tar.gz", map[string]string{"lockstep": "static " + arch, "README.md": "text", "VERSION": "1.2.3"})
		}
		if err := run(from, out, "registry.example.com:5000/ml/lockstep", ""); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(out, "lockstep_1.2.3_images.tar"))
		if err != nil {
			t.Fatal(err)
		}
		made[i] = b
	}
	if !bytes.Equal(made[0], made[1]) {
		t.Error("the same release makes two layouts")
	}
	layout := untar(t, made[0])
	if got := string(layout["oci-layout"].data); got != `{"imageLayoutVersion":"1.0.0"}` {
		t.Errorf("oci-layout: %s", got)
	}
	blob := func(d descriptor, v any) []byte {
		t.Helper()
		b := layout["blobs/"+strings.Replace(d.Digest, ":", "/", 1)].data
		if len(b) != d.Size || digest(b) != d.Digest {
			t.Fatalf("%s: %d bytes with digest %s, want %d", d.Digest, len(b), digest(b), d.Size)
		}
		if v != nil {
			if err := json.Unmarshal(b, v); err != nil {
				t.Fatal(err)
			}
		}
		return b
	}
	var top, all index
	if err := json.Unmarshal(layout["index.json"].data, &top); err != nil {
		t.Fatal(err)
	}
	if len(top.Manifests) != 1 || top.Manifests[0].Annotations["io.containerd.image.name"] != "registry.example.com:5000/ml/lockstep:1.2.3" || top.Manifests[0].Annotations["org.opencontainers.image.ref.name"] != "1.2.3" {
		t.Fatalf("%+v", top)
	}
	blob(top.Manifests[0], &all)
	if len(all.Manifests) != 2 {
		t.Fatalf("%+v", all)
	}
	for _, d := range all.Manifests {
		var m manifest
		var c imageConfig
		blob(d, &m)
		blob(m.Config, &c)
		z, err := gzip.NewReader(bytes.NewReader(blob(m.Layers[0], nil)))
		if err != nil {
			t.Fatal(err)
		}
		plain, err := io.ReadAll(z)
		if err != nil {
			t.Fatal(err)
		}
		if c.Architecture != d.Platform.Architecture || c.RootFS.DiffIDs[0] != digest(plain) || c.Config.User != "65532:65532" || c.Created.Unix() != 1_700_000_000 {
			t.Errorf("%+v", c)
		}
		fs := untar(t, plain)
		if p := fs["usr/bin/lockstep"]; string(p.data) != "static "+c.Architecture || p.Mode != 0o755 || p.Uid != 0 || p.ModTime.Unix() != 1_700_000_000 {
			t.Errorf("the program: %q %+v", p.data, p.Header)
		}
		if p := fs["var/lib/lockstep/"]; p.Mode != 0o700 || p.Uid != nobody || p.Typeflag != tar.TypeDir {
			t.Errorf("the state directory: %+v", p.Header)
		}
		if len(fs) != 10 { // nothing that nobody knows of
			t.Errorf("%d files", len(fs))
		}
	}
}

// TestRefusals: what is no release makes no image.
func TestRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		archives map[string]map[string]string
		want     string
	}{
		"nothing":      {nil, "make release first"},
		"no program":   {map[string]map[string]string{"lockstep_1_linux_amd64.tar.gz": {"README.md": ""}}, "holds no program"},
		"two releases": {map[string]map[string]string{"lockstep_1_linux_amd64.tar.gz": {"lockstep": "x"}, "lockstep_2_linux_amd64.tar.gz": {"lockstep": "x"}}, "keep one release"},
	} {
		dir := t.TempDir()
		for n, files := range c.archives {
			archive(t, dir, n, files)
		}
		if err := run(dir, dir, "lockstep", ""); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestLibrary: the C library's files, of Debian before and after /lib became a link; and of
// another package none.
func TestLibrary(t *testing.T) {
	for _, prefix := range []string{"./lib", "./usr/lib"} {
		files := []file{
			{name: prefix + "/x86_64-linux-gnu/ld-linux-x86-64.so.2", data: []byte("loader")}, {name: prefix + "64/ld-linux-x86-64.so.2", link: prefix[1:] + "/x86_64-linux-gnu/ld-linux-x86-64.so.2"},
			{name: "./usr/share/doc/libc6/copyright", data: []byte("LGPL")}, {name: "./usr/bin/iconv", data: []byte("no")},
		}
		for _, n := range ofLibrary {
			files = append(files, file{name: prefix + "/x86_64-linux-gnu/" + n, data: []byte(n)})
		}
		fs, err := pack(files, time.Unix(0, 0))
		if err != nil {
			t.Fatal(err)
		}
		got, err := libraryIn(bytes.NewReader(fs))
		if err != nil {
			t.Fatal(err)
		}
		plain, err := pack(rootFS(release{program: []byte("p"), plugin: []byte("so")}, got), time.Unix(0, 0))
		if err != nil {
			t.Fatal(err)
		}
		in := untar(t, plain)
		_, merged := in["lib64"]
		if in["usr/bin/"+plugin].Mode != 0o755 || in["usr/share/doc/libc6/copyright"].Size == 0 || in["usr/bin/iconv"].Name != "" || merged != (prefix == "./usr/lib") {
			t.Errorf("%s: %v", prefix, in)
		}
		if f := in[strings.TrimPrefix(prefix, "./")+"64/ld-linux-x86-64.so.2"]; f.Typeflag != tar.TypeSymlink || f.Linkname == "" {
			t.Errorf("%s: the loader's link: %+v", prefix, f)
		}
	}
	if _, err := libraryIn(bytes.NewReader(make([]byte, 1024))); err == nil || !strings.Contains(err.Error(), "libc.so.6") {
		t.Errorf("an empty package: %v", err)
	}
}
