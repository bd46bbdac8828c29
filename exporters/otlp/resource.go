package otlp

import (
	"context"
	"crypto/rand"
	"fmt"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/resource"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"

	"github.com/lockstep-ccl/lockstep/collector"
)

// environment names the variables that say where a process runs, and the attributes that they
// become: Kubernetes' by semantic conventions, from the names that manifests give to values of
// the downward API, the first one that is set; Slurm's own, for which there are no conventions.
var environment = []struct {
	key  string
	vars []string
}{
	{string(semconv.K8SClusterNameKey), []string{"K8S_CLUSTER_NAME", "CLUSTER_NAME"}},
	{string(semconv.K8SNamespaceNameKey), []string{"K8S_NAMESPACE_NAME", "K8S_NAMESPACE", "POD_NAMESPACE"}},
	{string(semconv.K8SNodeNameKey), []string{"K8S_NODE_NAME", "NODE_NAME"}},
	{string(semconv.K8SPodNameKey), []string{"K8S_POD_NAME", "POD_NAME"}},
	{string(semconv.K8SPodUIDKey), []string{"K8S_POD_UID", "POD_UID"}},
	{string(semconv.K8SContainerNameKey), []string{"K8S_CONTAINER_NAME", "CONTAINER_NAME"}},
	{string(semconv.K8SJobNameKey), []string{"K8S_JOB_NAME"}},
	{"slurm.cluster.name", []string{"SLURM_CLUSTER_NAME"}},
	{"slurm.job.id", []string{"SLURM_JOB_ID"}},
	{"slurm.job.name", []string{"SLURM_JOB_NAME"}},
	{"slurm.job.partition", []string{"SLURM_JOB_PARTITION"}},
	{"slurm.step.id", []string{"SLURM_STEP_ID"}},
	{"slurm.node.name", []string{"SLURMD_NODENAME"}},
	{"slurm.procid", []string{"SLURM_PROCID"}},
}

// WorkloadOf says where a process runs, by its environment: nothing but the variables that
// name its pod or Slurm job is looked at. nil when there are none.
func WorkloadOf(getenv func(string) string) *collector.Workload {
	var w collector.Workload
	for _, e := range environment {
		for _, name := range e.vars {
			if v := getenv(name); v != "" {
				w.Attributes = append(w.Attributes, collector.Attribute{Key: e.key, Value: v})
				break
			}
		}
	}
	if w.Attributes == nil {
		return nil
	}
	return &w
}

// processResource describes this process: its service, host, and where it runs. What OTEL_RESOURCE_ATTRIBUTES
// and OTEL_SERVICE_NAME say comes before all of it.
func processResource(service, version, host string) (*resource.Resource, error) {
	kv := []attribute.KeyValue{semconv.ServiceName(service), semconv.ServiceInstanceID(instance())}
	if version != "" {
		kv = append(kv, semconv.ServiceVersion(version))
	}
	if host != "" {
		kv = append(kv, semconv.HostName(host))
	}
	if w := WorkloadOf(env); w != nil {
		for _, a := range w.Attributes {
			kv = append(kv, attribute.String(a.Key, a.Value))
		}
	}
	r, err := resource.New(context.Background(),
		resource.WithSchemaURL(semconv.SchemaURL), resource.WithAttributes(kv...), resource.WithFromEnv())
	if err != nil {
		return nil, fmt.Errorf("OTEL_RESOURCE_ATTRIBUTES: %w", err)
	}
	return r, nil
}

// instance is a random UUID (version 4), as the conventions ask for.
func instance() string {
	var b [16]byte
	rand.Read(b[:])
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// version is the program's, also that of the instrumentation scope.
func (c Config) version() string {
	if c.Resource != nil {
		if v, ok := c.Resource.Set().Value(semconv.ServiceVersionKey); ok {
			return v.AsString()
		}
	}
	return ""
}
