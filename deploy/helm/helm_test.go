package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// release is where the charts are rendered to.
const release = "lockstep"

// certificate and podMonitor are cert-manager's and the Prometheus operator's objects, as
// far as the charts have fields of them.
type (
	certificate struct {
		metav1.TypeMeta   `json:",inline"`
		metav1.ObjectMeta `json:"metadata"`
		Spec              struct {
			SecretName, Duration, RenewBefore string
			PrivateKey                        struct {
				Algorithm, RotationPolicy string
				Size                      int
			}
			Usages, DNSNames []string
			URIs             []string `json:"uris"`
			IssuerRef        struct{ Name, Kind, Group string }
		} `json:"spec"`
	}
	podMonitor struct {
		metav1.TypeMeta   `json:",inline"`
		metav1.ObjectMeta `json:"metadata"`
		Spec              struct {
			Selector            metav1.LabelSelector
			NamespaceSelector   struct{ MatchNames []string }
			PodMetricsEndpoints []struct {
				Port, Interval string
				Relabelings    []struct {
					SourceLabels             []string
					TargetLabel, Replacement string
				}
			}
		} `json:"spec"`
	}
)

// kinds is all that the charts may own. There is no Pod, Job or JobSet among them, no
// definition of a resource, no webhook that others' objects would wait for.
var kinds = map[string]func() any{
	"v1/ServiceAccount":                               func() any { return &corev1.ServiceAccount{} },
	"v1/ConfigMap":                                    func() any { return &corev1.ConfigMap{} },
	"v1/Secret":                                       func() any { return &corev1.Secret{} },
	"v1/Service":                                      func() any { return &corev1.Service{} },
	"v1/PersistentVolumeClaim":                        func() any { return &corev1.PersistentVolumeClaim{} },
	"apps/v1/DaemonSet":                               func() any { return &appsv1.DaemonSet{} },
	"apps/v1/Deployment":                              func() any { return &appsv1.Deployment{} },
	"rbac.authorization.k8s.io/v1/Role":               func() any { return &rbacv1.Role{} },
	"rbac.authorization.k8s.io/v1/ClusterRole":        func() any { return &rbacv1.ClusterRole{} },
	"rbac.authorization.k8s.io/v1/RoleBinding":        func() any { return &rbacv1.RoleBinding{} },
	"rbac.authorization.k8s.io/v1/ClusterRoleBinding": func() any { return &rbacv1.ClusterRoleBinding{} },
	"cert-manager.io/v1/Certificate":                  func() any { return &certificate{} },
	"monitoring.coreos.com/v1/PodMonitor":             func() any { return &podMonitor{} },
}

// object is one that a chart renders to.
type object struct {
	kind string
	metav1.ObjectMeta
	any
}

// objects decodes a manifest strictly: a field that its kind does not have is an error.
func objects(t *testing.T, manifest []byte) []object {
	t.Helper()
	var all []object
	seen := map[string]bool{}
	for doc := range bytes.SplitSeq(append([]byte("\n"), manifest...), []byte("\n---")) {
		var head struct {
			metav1.TypeMeta   `json:",inline"`
			metav1.ObjectMeta `json:"metadata"`
		}
		if err := yaml.Unmarshal(doc, &head); err != nil {
			t.Fatalf("%v:\n%s", err, doc)
		}
		if head.Kind == "" {
			continue
		}
		make, ok := kinds[head.APIVersion+"/"+head.Kind]
		if !ok {
			t.Fatalf("a chart owns a %s/%s", head.APIVersion, head.Kind)
		}
		o := object{head.Kind, head.ObjectMeta, make()}
		if err := yaml.UnmarshalStrict(doc, o.any); err != nil {
			t.Errorf("%s %s: %v", head.Kind, head.Name, err)
		}
		key := head.Kind + " " + head.Namespace + "/" + head.Name
		if seen[key] {
			t.Errorf("%s is there twice", key)
		}
		seen[key] = true
		all = append(all, o)
	}
	if len(all) == 0 {
		t.Fatal("it renders to nothing")
	}
	return all
}

// cases are the files of values, by chart.
func cases(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("testdata/lockstep*/*.yaml")
	if err != nil || len(files) < 6 {
		t.Fatalf("%v %v", files, err)
	}
	return files
}

func golden(values string) string { return strings.TrimSuffix(values, ".yaml") + ".golden" }

// sources is a digest of all that a rendering follows from, on the golden file's first line:
// without helm, too, one that is stale is seen.
func sources(t *testing.T, values string) string {
	t.Helper()
	h := sha256.New()
	add := func(path string, _ fs.DirEntry, err error) error {
		if err != nil || strings.Contains(path, "/files/") || strings.HasSuffix(path, "NOTES.txt") || filepath.Ext(path) == ".md" {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return nil //nolint:nilerr // a directory
		}
		_, err = fmt.Fprintf(h, "%s %d\n%s", path, len(data), data)
		return err
	}
	for _, root := range []string{filepath.Base(filepath.Dir(values)), values} {
		if err := filepath.WalkDir(root, add); err != nil {
			t.Fatal(err)
		}
	}
	return fmt.Sprintf("# Rendered by make test-chart ARGS=-update, from sources %x.\n", h.Sum(nil)[:8])
}

func rendered(t *testing.T, values string) []object {
	t.Helper()
	b, err := os.ReadFile(golden(values))
	if err != nil {
		t.Fatal(err)
	}
	return objects(t, b)
}

// TestRenderedIsFresh: the golden files are of these charts and values.
func TestRenderedIsFresh(t *testing.T) {
	if *update {
		t.Skip("they are written now")
	}
	for _, values := range cases(t) {
		b, err := os.ReadFile(golden(values))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.HasPrefix(b, []byte(sources(t, values))) {
			t.Errorf("%s is stale: make test-chart ARGS=-update", golden(values))
		}
	}
}

// TestWhatTheChartsOwn: nothing of a running job. What is in a namespace of jobs is the
// binding of rights, and a master; nothing there is a hook, or waits for a finalizer. What
// must outlive the charts is kept.
func TestWhatTheChartsOwn(t *testing.T) {
	for _, values := range cases(t) {
		for _, o := range rendered(t, values) {
			what := fmt.Sprintf("%s: %s %s/%s", values, o.kind, o.Namespace, o.Name)
			if o.Labels["app.kubernetes.io/managed-by"] != "Helm" || !strings.HasPrefix(o.Name, "lockstep") {
				t.Errorf("%s: it does not say whose it is: %v", what, o.Labels)
			}
			if len(o.Finalizers) > 0 || len(o.OwnerReferences) > 0 {
				t.Errorf("%s: its end waits for something", what)
			}
			for a, v := range o.Annotations {
				if strings.HasPrefix(a, "helm.sh/hook") {
					t.Errorf("%s is a hook", what)
				}
				if a == "helm.sh/resource-policy" && (v != "keep" || o.kind != "Secret" && o.kind != "PersistentVolumeClaim") {
					t.Errorf("%s: %s", what, v)
				}
			}
			if keep := o.Annotations["helm.sh/resource-policy"] == "keep"; o.kind == "PersistentVolumeClaim" && !keep {
				t.Errorf("%s: uninstalling removes a journal", what)
			}
			own := map[string]bool{release: true, "": true}
			if !own[o.Namespace] && o.kind != "RoleBinding" && o.kind != "Role" {
				t.Errorf("%s is in a namespace of others", what)
			}
		}
	}
}

// pods are the templates of pods, by their object's name.
func pods(list []object) map[string]corev1.PodTemplateSpec {
	m := map[string]corev1.PodTemplateSpec{}
	for _, o := range list {
		switch v := o.any.(type) {
		case *appsv1.DaemonSet:
			m[o.Name] = v.Spec.Template
		case *appsv1.Deployment:
			m[o.Name] = v.Spec.Template
		}
	}
	return m
}

// TestLeastPrivilege: what each pod may, and no more.
func TestLeastPrivilege(t *testing.T) {
	for _, values := range cases(t) {
		agents := 0
		for name, p := range pods(rendered(t, values)) {
			agent := name == "lockstep-agent"
			if len(p.Spec.Containers) != 1 || len(p.Spec.InitContainers) != 0 {
				t.Fatalf("%s: %s has other containers", values, name)
			}
			c := p.Spec.Containers[0]
			s := c.SecurityContext
			if s.Privileged != nil && *s.Privileged || *s.AllowPrivilegeEscalation || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) || p.Spec.SecurityContext.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
				t.Errorf("%s: %s has more than it needs: %+v", values, name, s)
			}
			if c.Resources.Limits.Memory().IsZero() || c.ReadinessProbe == nil {
				t.Errorf("%s: %s has no bound or no probe", values, name)
			}
			if p.Spec.HostIPC || p.Spec.HostPID != agent {
				t.Errorf("%s: %s shares what is the host's", values, name)
			}
			if api := name == "lockstep-remediator"; !api && (p.Spec.AutomountServiceAccountToken == nil || *p.Spec.AutomountServiceAccountToken) {
				t.Errorf("%s: %s has a token for the API server", values, name)
			}
			var hostPaths []string
			for _, v := range p.Spec.Volumes {
				if v.HostPath != nil {
					hostPaths = append(hostPaths, v.HostPath.Path)
				}
				if v.Secret != nil && *v.Secret.DefaultMode&0o037 != 0 {
					t.Errorf("%s: %s: secret %s is open to others", values, name, v.Name)
				}
			}
			if !agent {
				if len(s.Capabilities.Add) > 0 || *p.Spec.SecurityContext.RunAsUser != 65532 || !*p.Spec.SecurityContext.RunAsNonRoot || len(hostPaths) > 0 {
					t.Errorf("%s: %s is not restricted: %+v %v", values, name, s, hostPaths)
				}
				continue
			}
			agents++
			for _, m := range p.Spec.Containers[0].VolumeMounts {
				if m.Name == "cgroup" && !m.ReadOnly {
					t.Errorf("%s: the agent could write to the host's cgroups", values)
				}
			}
			want := []corev1.Capability{"DAC_READ_SEARCH", "SYS_PTRACE", "KILL"}
			paths := []string{"/dev/shm/lockstep", "/sys/fs/cgroup"} // the latter read-only, below
			switch filepath.Base(values) {
			case "all.yaml":
				want, paths = append(want, "BPF", "PERFMON"), append(paths, "/etc/lockstep/pki")
			case "certmanager.yaml":
				want = want[:2]
			}
			if !slices.Equal(s.Capabilities.Add, want) || !slices.Equal(hostPaths, paths) || !*s.ReadOnlyRootFilesystem {
				t.Errorf("%s: the agent has %v and %v, want %v and %v", values, s.Capabilities.Add, hostPaths, want, paths)
			}
		}
		if want := strings.Contains(values, "lockstep/"); (agents == 1) != want {
			t.Errorf("%s: %d agents", values, agents)
		}
	}
}

// granted are rights by subject's namespace left out: "verb group/resource in NAMESPACE".
func granted(list []object) map[string]bool {
	roles := map[string][]rbacv1.PolicyRule{}
	for _, o := range list {
		switch v := o.any.(type) {
		case *rbacv1.Role:
			roles["Role"+v.Namespace+"/"+v.Name] = v.Rules
		case *rbacv1.ClusterRole:
			roles["ClusterRole/"+v.Name] = v.Rules
		}
	}
	rights := map[string]bool{}
	bind := func(in string, ref rbacv1.RoleRef) {
		key := ref.Kind + in + "/" + ref.Name
		if ref.Kind == "ClusterRole" {
			key = "ClusterRole/" + ref.Name
		}
		for _, r := range roles[key] {
			for _, g := range r.APIGroups {
				for _, res := range r.Resources {
					for _, v := range r.Verbs {
						rights[fmt.Sprintf("%s %s/%s in %s", v, g, res, in)] = true
					}
				}
			}
		}
	}
	for _, o := range list {
		switch v := o.any.(type) {
		case *rbacv1.RoleBinding:
			bind(v.Namespace, v.RoleRef)
		case *rbacv1.ClusterRoleBinding:
			bind("", v.RoleRef)
		}
	}
	return rights
}

// TestRights: the remediator has those of deploy/kubernetes/rbac.yaml, which are those that
// it uses, in each namespace of jobs; nobody else has any.
func TestRights(t *testing.T) {
	b, err := os.ReadFile("../kubernetes/rbac.yaml")
	if err != nil {
		t.Fatal(err)
	}
	docs := strings.Split(string(b), "\n---\n") // but for the namespace, the first
	source := granted(objects(t, []byte(strings.Join(docs[1:], "\n---\n"))))
	if len(source) < 20 {
		t.Fatalf("deploy/kubernetes/rbac.yaml grants %v", source)
	}
	for values, namespaces := range map[string][]string{"default": {"training"}, "all": {"training", "research"}, "agents": nil} {
		want := map[string]bool{}
		for r := range source {
			if len(namespaces) == 0 {
				break
			}
			in := []string{"training"}
			if strings.HasSuffix(r, " in training") {
				in = namespaces
			}
			for _, n := range in {
				want[strings.Replace(r, " in training", " in "+n, 1)] = true
			}
		}
		list := rendered(t, "testdata/lockstep/"+values+".yaml")
		got := granted(list)
		for r := range want {
			if !got[r] {
				t.Errorf("%s: not granted: %s", values, r)
			}
		}
		for r := range got {
			if !want[r] {
				t.Errorf("%s: granted: %s", values, r)
			}
		}
		for _, o := range list {
			var subjects []rbacv1.Subject
			switch v := o.any.(type) {
			case *rbacv1.RoleBinding:
				subjects = v.Subjects
			case *rbacv1.ClusterRoleBinding:
				subjects = v.Subjects
			default:
				continue
			}
			if len(subjects) != 1 || subjects[0] != (rbacv1.Subject{Kind: "ServiceAccount", Name: "lockstep-remediator", Namespace: release}) {
				t.Errorf("%s: %s gives rights to %v", values, o.Name, subjects)
			}
		}
	}
}

// TestDryRunByDefault: an installation without values does nothing to jobs.
func TestDryRunByDefault(t *testing.T) {
	for _, o := range rendered(t, "testdata/lockstep/default.yaml") {
		if c, ok := o.any.(*corev1.ConfigMap); ok && !strings.Contains(c.Data["r.yaml"], "dry_run: true") {
			t.Errorf("%s", c.Data["r.yaml"])
		}
	}
}

// TestSelectors: each service and workload finds its own pods, and no two workloads the same ones.
func TestSelectors(t *testing.T) {
	for _, values := range cases(t) {
		list := rendered(t, values)
		matches := func(sel map[string]string) (names []string) {
			for name, p := range pods(list) {
				all := len(sel) > 0
				for k, v := range sel {
					all = all && p.Labels[k] == v
				}
				if all {
					names = append(names, name)
				}
			}
			return names
		}
		for _, o := range list {
			var sel map[string]string
			switch v := o.any.(type) {
			case *corev1.Service:
				sel = v.Spec.Selector
			case *appsv1.DaemonSet:
				sel = v.Spec.Selector.MatchLabels
			case *appsv1.Deployment:
				sel = v.Spec.Selector.MatchLabels
			default:
				continue
			}
			if got := matches(sel); len(got) != 1 || got[0] != o.Name {
				t.Errorf("%s: %s %s selects %v", values, o.kind, o.Name, got)
			}
		}
	}
}

// TestGeneratedAnew: what main writes is what is committed; and a manifest that it does not
// understand is refused, not passed on.
func TestGeneratedAnew(t *testing.T) {
	chart := t.TempDir()
	if err := os.Mkdir(filepath.Join(chart, "templates"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := generate("../..", chart); err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile(filepath.Join(chart, "templates/rbac.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile("lockstep/templates/rbac.yaml"); err != nil || !bytes.Equal(got, want) {
		t.Errorf("lockstep/templates/rbac.yaml is stale: make generate (%v)", err)
	}
	// The chart has its files by links.
	for link, source := range map[string]string{"lockstep.rules.yaml": "../../rules/lockstep.rules.yaml", "dashboards": "../../dashboards/json"} {
		to, err := filepath.EvalSymlinks(filepath.Join("lockstep/files", link))
		if err != nil || to != source {
			t.Errorf("lockstep/files/%s leads to %q, want %s (%v)", link, to, source, err)
		}
	}
	for _, bad := range []string{"", "kind: Role\nmetadata:\n  name: x\n", "kind: Role\nmetadata: {name: x, namespace: lockstep}\n"} {
		if text, err := rights(bad); err == nil {
			t.Errorf("%q becomes %q", bad, text)
		}
	}
}

// TestVersions: the charts, and the images that they pull, are the release's.
func TestVersions(t *testing.T) {
	b, err := os.ReadFile("../../VERSION")
	if err != nil {
		t.Fatal(err)
	}
	version := strings.TrimSpace(string(b))
	for _, chart := range []string{"lockstep", "lockstep-master"} {
		var c struct{ Name, Version, AppVersion string }
		b, err := os.ReadFile(filepath.Join(chart, "Chart.yaml"))
		if err != nil {
			t.Fatal(err)
		}
		if err := yaml.Unmarshal(b, &c); err != nil {
			t.Fatal(err)
		}
		// An image's tag has no "+", which a version may have.
		if c.Name != chart || c.Version != version || c.AppVersion != strings.ReplaceAll(version, "+", "-") {
			t.Errorf("%s/Chart.yaml says version %s and appVersion %s; VERSION is %s", chart, c.Version, c.AppVersion, version)
		}
	}
}
