package main

import (
	"bytes"
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
)

// CycloneDX 1.6, as far as a Go program has something to say.
type (
	bom struct {
		Format       string       `json:"bomFormat"`
		Spec         string       `json:"specVersion"`
		Version      int          `json:"version"`
		Metadata     metadata     `json:"metadata"`
		Components   []component  `json:"components"`
		Dependencies []dependency `json:"dependencies"`
	}
	metadata struct {
		Component component `json:"component"`
	}
	component struct {
		Type       string     `json:"type"`
		Ref        string     `json:"bom-ref"`
		Name       string     `json:"name"`
		Version    string     `json:"version"`
		PURL       string     `json:"purl"`
		Properties []property `json:"properties,omitempty"`
	}
	property struct {
		Name  string `json:"name"`
		Value string `json:"value"`
	}
	dependency struct {
		Ref string   `json:"ref"`
		On  []string `json:"dependsOn,omitempty"`
	}
)

// sbom lists the modules that a program holds, by what the linker has written into it.
func sbom(program, version string) ([]byte, error) {
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return nil, fmt.Errorf("sbom of %s: %w", program, err)
	}
	self := module(&debug.Module{Path: info.Main.Path, Version: "v" + version})
	self.Type = "application"
	for _, s := range info.Settings {
		if slices.Contains([]string{"GOOS", "GOARCH", "CGO_ENABLED", "-trimpath", "GOAMD64", "GOARM64"}, s.Key) {
			self.Properties = append(self.Properties, property{"go:build:" + strings.TrimPrefix(s.Key, "-"), s.Value})
		}
	}
	b := bom{Format: "CycloneDX", Spec: "1.6", Version: 1, Metadata: metadata{self}}
	b.Components = append(b.Components, component{Type: "library", Ref: "pkg:golang/std@" + info.GoVersion, Name: "std", Version: info.GoVersion, PURL: "pkg:golang/std@" + strings.TrimPrefix(info.GoVersion, "go")})
	for _, d := range info.Deps {
		if d.Replace != nil {
			d = d.Replace
		}
		b.Components = append(b.Components, module(d))
	}
	all := dependency{Ref: self.Ref}
	for _, c := range b.Components {
		all.On = append(all.On, c.Ref)
	}
	b.Dependencies = []dependency{all}
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(b); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

func module(m *debug.Module) component {
	purl := "pkg:golang/" + m.Path + "@" + strings.ReplaceAll(m.Version, "+", "%2B")
	c := component{Type: "library", Ref: purl, Name: m.Path, Version: m.Version, PURL: purl}
	if m.Sum != "" {
		c.Properties = []property{{"go:sum", m.Sum}}
	}
	return c
}
