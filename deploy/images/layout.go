package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"
)

// Media types of the OCI image specification, 1.1.
const (
	indexType    = "application/vnd.oci.image.index.v1+json"
	manifestType = "application/vnd.oci.image.manifest.v1+json"
	configType   = "application/vnd.oci.image.config.v1+json"
	layerType    = "application/vnd.oci.image.layer.v1.tar+gzip"
)

type (
	descriptor struct {
		MediaType   string            `json:"mediaType"`
		Digest      string            `json:"digest"`
		Size        int               `json:"size"`
		Platform    *osArch           `json:"platform,omitempty"`
		Annotations map[string]string `json:"annotations,omitempty"`
	}
	osArch struct {
		Architecture string `json:"architecture"`
		OS           string `json:"os"`
	}
	index struct {
		Schema    int          `json:"schemaVersion"`
		MediaType string       `json:"mediaType"`
		Manifests []descriptor `json:"manifests"`
	}
	manifest struct {
		Schema    int          `json:"schemaVersion"`
		MediaType string       `json:"mediaType"`
		Config    descriptor   `json:"config"`
		Layers    []descriptor `json:"layers"`
	}
	imageConfig struct {
		Created time.Time `json:"created"`
		osArch
		Config  runConfig `json:"config"`
		RootFS  rootfs    `json:"rootfs"`
		History []history `json:"history"`
	}
	runConfig struct {
		User       string            `json:"User"`
		Env        []string          `json:"Env"`
		Entrypoint []string          `json:"Entrypoint"`
		Cmd        []string          `json:"Cmd"`
		Labels     map[string]string `json:"Labels"`
	}
	rootfs struct {
		Type    string   `json:"type"`
		DiffIDs []string `json:"diff_ids"`
	}
	history struct {
		Created   time.Time `json:"created"`
		CreatedBy string    `json:"created_by"`
	}
)

// platform is an image for one architecture.
type platform struct {
	arch  string
	at    time.Time
	files []file
}

// layout is an OCI layout in the making.
type layout struct {
	blobs  map[string][]byte // by digest
	images []descriptor
}

func newLayout() *layout { return &layout{blobs: map[string][]byte{}} }

// add puts an image in, for all its architectures.
func (l *layout) add(ref string, of []platform) error {
	all := index{Schema: 2, MediaType: indexType}
	for _, p := range of {
		d, err := l.image(ref, p)
		if err != nil {
			return fmt.Errorf("image %s of %s: %w", ref, p.arch, err)
		}
		all.Manifests = append(all.Manifests, d)
	}
	d, err := l.json(indexType, all)
	if err != nil {
		return err
	}
	_, tag, _ := strings.Cut(ref[strings.LastIndex(ref, "/")+1:], ":")
	// The first is what skopeo and podman read, the second is containerd's whole name.
	d.Annotations = map[string]string{"org.opencontainers.image.ref.name": tag, "io.containerd.image.name": full(ref)}
	l.images = append(l.images, d)
	return nil
}

// full is a name as containerd has it: with a registry, and a repository of one.
func full(ref string) string {
	first, rest, has := strings.Cut(ref, "/")
	switch {
	case has && (strings.ContainsAny(first, ".:") || first == "localhost"):
		return ref
	case has:
		return "docker.io/" + first + "/" + rest
	}
	return "docker.io/library/" + ref
}

func (l *layout) image(ref string, p platform) (descriptor, error) {
	plain, err := pack(p.files, p.at)
	if err != nil {
		return descriptor{}, err
	}
	var packed bytes.Buffer
	z, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
	if err != nil {
		return descriptor{}, err
	}
	if _, err := z.Write(plain); err != nil {
		return descriptor{}, err
	}
	if err := z.Close(); err != nil {
		return descriptor{}, err
	}
	on := osArch{p.arch, "linux"}
	config, err := l.json(configType, imageConfig{
		Created: p.at, osArch: on,
		Config: runConfig{
			User: fmt.Sprintf("%d:%[1]d", nobody), Env: []string{"PATH=/usr/bin"},
			Entrypoint: []string{"/usr/bin/lockstep"}, Cmd: []string{"--help"},
			Labels: map[string]string{"org.opencontainers.image.title": "lockstep", "org.opencontainers.image.version": ref[strings.LastIndex(ref, ":")+1:]},
		},
		RootFS:  rootfs{"layers", []string{digest(plain)}},
		History: []history{{p.at, "deploy/images"}},
	})
	if err != nil {
		return descriptor{}, err
	}
	layer := descriptor{MediaType: layerType, Digest: digest(packed.Bytes()), Size: packed.Len()}
	l.blobs[layer.Digest] = packed.Bytes()
	d, err := l.json(manifestType, manifest{2, manifestType, config, []descriptor{layer}})
	d.Platform = &on
	return d, err
}

// json stores a value, and says where.
func (l *layout) json(mediaType string, v any) (descriptor, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return descriptor{}, err
	}
	d := descriptor{MediaType: mediaType, Digest: digest(b), Size: len(b)}
	l.blobs[d.Digest] = b
	return d, nil
}

func digest(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }

// pack is the tar of a layer.
func pack(files []file, at time.Time) ([]byte, error) {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, f := range files {
		h := &tar.Header{Typeflag: tar.TypeReg, Name: f.name, Mode: f.mode, Uid: f.user, Gid: f.user, Size: int64(len(f.data)), ModTime: at, Format: tar.FormatPAX}
		switch {
		case f.dir:
			h.Typeflag, h.Name = tar.TypeDir, f.name+"/"
		case f.link != "":
			h.Typeflag, h.Linkname = tar.TypeSymlink, f.link
		}
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.data); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// list is a line for each image: its name, and the digest to pin.
func (l *layout) list() string {
	var b strings.Builder
	for _, d := range l.images {
		fmt.Fprintf(&b, "%s@%s\n", d.Annotations["io.containerd.image.name"], d.Digest)
	}
	return b.String()
}

// write writes the layout as a tar file.
func (l *layout) write(path string, at time.Time) error {
	top, err := json.Marshal(index{2, indexType, l.images})
	if err != nil {
		return err
	}
	files := []file{
		{name: "oci-layout", mode: 0o644, data: []byte(`{"imageLayoutVersion":"1.0.0"}`)},
		{name: "index.json", mode: 0o644, data: top},
	}
	for d, b := range l.blobs {
		files = append(files, file{name: "blobs/" + strings.Replace(d, ":", "/", 1), mode: 0o644, data: b})
	}
	data, err := pack(slices.Clip(withParents(files)), at)
	if err != nil {
		return err
	}
	return os.WriteFile(path, data, 0o644)
}
