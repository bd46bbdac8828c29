package kubernetes

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
	"go.yaml.in/yaml/v3"
)

// asked is what all tests of this run have asked of API servers: "verb group/resource in NAMESPACE".
var asked struct {
	sync.Mutex
	m map[string]bool
}

func noteAsked(verb, group, resource, namespace string) {
	asked.Lock()
	defer asked.Unlock()
	if asked.m == nil {
		asked.m = map[string]bool{}
	}
	if namespace == ns2 {
		namespace = ns // each namespace of jobs gets the same binding: the manifest shows it for one
	}
	asked.m[fmt.Sprintf("%s %s/%s in %s", verb, group, resource, namespace)] = true
}

// TestMain compares, after all tests, what was asked with what deploy/kubernetes/rbac.yaml
// grants: each verb granted is used, and no other is needed.
func TestMain(m *testing.M) {
	flag.Parse()
	code := m.Run()
	if code == 0 && flag.Lookup("test.run").Value.String() == "" && flag.Lookup("test.list").Value.String() == "" {
		if err := compareRights(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func compareRights() error {
	granted, err := grants("../../deploy/kubernetes/rbac.yaml")
	if err != nil {
		return err
	}
	var wrong []string
	for g := range granted {
		if !asked.m[g] {
			wrong = append(wrong, "granted, and not used: "+g)
		}
	}
	for a := range asked.m {
		if !granted[a] {
			wrong = append(wrong, "asked for, and not granted: "+a)
		}
	}
	if slices.Sort(wrong); len(wrong) > 0 {
		return fmt.Errorf("deploy/kubernetes/rbac.yaml:\n%s", strings.Join(wrong, "\n"))
	}
	return nil
}

// grants reads which rights a manifest gives, and where.
func grants(file string) (map[string]bool, error) {
	type rule struct {
		APIGroups []string `yaml:"apiGroups"`
		Resources []string
		Verbs     []string
	}
	type object struct {
		Kind     string
		Metadata struct{ Name, Namespace string }
		Rules    []rule
		RoleRef  struct{ Kind, Name string } `yaml:"roleRef"`
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	roles, bindings := map[string][]rule{}, []object{}
	for d := yaml.NewDecoder(bytes.NewReader(text)); ; {
		var o object
		if err := d.Decode(&o); err == io.EOF {
			break
		} else if err != nil {
			return nil, err
		}
		switch o.Kind {
		case "Role", "ClusterRole":
			roles[o.Kind+o.Metadata.Namespace+"/"+o.Metadata.Name] = o.Rules
		case "RoleBinding", "ClusterRoleBinding":
			bindings = append(bindings, o)
		}
	}
	granted := map[string]bool{}
	for _, b := range bindings {
		where := b.Metadata.Namespace
		if b.RoleRef.Kind == "ClusterRole" {
			where = ""
		}
		for _, r := range roles[b.RoleRef.Kind+where+"/"+b.RoleRef.Name] {
			for _, g := range r.APIGroups {
				for _, res := range r.Resources {
					for _, v := range r.Verbs {
						granted[fmt.Sprintf("%s %s/%s in %s", v, g, res, b.Metadata.Namespace)] = true
					}
				}
			}
		}
		if b.RoleRef.Name == "cluster-admin" || slices.Contains(slices.Collect(maps.Keys(granted)), "* */* in ") {
			return nil, fmt.Errorf("%s binds everything", b.Metadata.Name)
		}
	}
	if len(granted) == 0 {
		return nil, fmt.Errorf("%s grants nothing: it is not read as it should be", file)
	}
	return granted, nil
}
