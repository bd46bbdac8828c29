package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

func main() {
	if err := generate("../..", "lockstep"); err != nil {
		fmt.Fprintln(os.Stderr, "helm:", err)
		os.Exit(1)
	}
}

// generate fills a chart from the tree at root.
func generate(root, chart string) error {
	manifest, err := os.ReadFile(filepath.Join(root, "deploy/kubernetes/rbac.yaml"))
	if err != nil {
		return err
	}
	text, err := rights(string(manifest))
	if err != nil {
		return fmt.Errorf("deploy/kubernetes/rbac.yaml: %w", err)
	}
	files := map[string][]byte{"templates/rbac.yaml": []byte(text)}
	copied, err := filepath.Glob(filepath.Join(root, "dashboards/json/*.json"))
	if err != nil || len(copied) == 0 {
		return fmt.Errorf("dashboards/json: there are none (%w)", err)
	}
	for _, path := range copied {
		if files["files/dashboards/"+filepath.Base(path)], err = os.ReadFile(path); err != nil {
			return err
		}
	}
	if files["files/lockstep.rules.yaml"], err = os.ReadFile(filepath.Join(root, "rules/lockstep.rules.yaml")); err != nil {
		return err
	}
	if err := os.RemoveAll(filepath.Join(chart, "files")); err != nil { // what is gone at its source
		return err
	}
	for name, data := range files {
		path := filepath.Join(chart, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, data, 0o644); err != nil {
			return err
		}
	}
	return nil
}

const (
	rightsHead = `{{- /* Generated from deploy/kubernetes/rbac.yaml: change that, and make generate. */ -}}
{{- if .Values.remediator.enabled }}
{{- if has .Release.Namespace (list "default" "kube-node-lease") }}
{{- fail (printf "namespace %s holds rights of the remediator already: install into one of its own (--namespace lockstep)" .Release.Namespace) }}
{{- end }}
{{- $labels := include "lockstep.labels" (dict "root" . "component" "remediator") | fromYaml | toJson }}
`
	own  = "namespace: lockstep}"
	jobs = "namespace: training}"
)

var metadata = regexp.MustCompile(`(?m)^metadata: \{(.*)\}$`)

// rights makes a template of the manifest: its own namespace is the release's, and what it
// has for one namespace of jobs is there for each.
func rights(manifest string) (string, error) {
	var b strings.Builder
	b.WriteString(rightsHead)
	each := 0
	for doc := range strings.SplitSeq(manifest, "\n---\n") {
		if strings.Contains(doc, "\nkind: Namespace\n") {
			continue
		}
		doc = strings.TrimRight(doc, "\n")
		labelled := metadata.ReplaceAllString(doc, "metadata: {$1, labels: {{ $$labels }}}")
		if labelled == doc {
			return "", fmt.Errorf("no metadata in one line: %q", doc)
		}
		labelled = strings.ReplaceAll(labelled, strings.TrimSuffix(own, "}")+",", "namespace: {{ $.Release.Namespace }},")
		labelled = strings.ReplaceAll(labelled, own, "namespace: {{ $.Release.Namespace }}}")
		if strings.Contains(doc, jobs) {
			each++
			labelled = strings.ReplaceAll(labelled, strings.TrimSuffix(jobs, "}")+",", "namespace: {{ . }},")
			fmt.Fprintf(&b, "{{- range .Values.namespaces }}\n---\n%s\n{{- end }}\n", labelled)
			continue
		}
		fmt.Fprintf(&b, "---\n%s\n", labelled)
	}
	if each != 1 {
		return "", fmt.Errorf("%d objects are in a namespace of jobs (%s), want one", each, strings.TrimSuffix(jobs, "}"))
	}
	b.WriteString("{{- end }}\n")
	return b.String(), nil
}
