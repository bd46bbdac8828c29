package otlp

import (
	"go.opentelemetry.io/otel/sdk/resource"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

const scopeName = "github.com/lockstep-ccl/lockstep/ccl"

// jobResource is the part of a request that all spans of a job share: the
// process's resource and the job's name, encoded once.
type jobResource struct {
	resource  []byte // ResourceSpans.resource
	schemaURL []byte // ResourceSpans.schema_url
	scope     []byte // ScopeSpans.scope
}

func newJobResource(process *resource.Resource, job string) *jobResource {
	var attrs []byte
	schema := semconv.SchemaURL
	if process != nil {
		for _, kv := range process.Attributes() {
			if kv.Key != names.AttrJob {
				attrs = appendString(attrs, tagResourceAttribute, valid(string(kv.Key)), valid(kv.Value.String()))
			}
		}
		schema = process.SchemaURL()
	}
	attrs = appendString(attrs, tagResourceAttribute, names.AttrJob, clean(job))
	scope := appendText(nil, tagScopeName, scopeName)
	if version := (Config{Resource: process}).version(); version != "" {
		scope = appendText(scope, tagScopeVersion, valid(version))
	}
	r := &jobResource{resource: appendField(nil, tagResource, attrs), scope: appendField(nil, tagScope, scope)}
	if schema != "" {
		r.schemaURL = appendText(nil, tagSchemaURL, schema)
	}
	return r
}

// appendRequest appends to b one ResourceSpans of an ExportTraceServiceRequest.
// spans are fields of ScopeSpans.
func (r *jobResource) appendRequest(b, spans []byte) []byte {
	inScope := len(r.scope) + len(spans)
	size := len(r.resource) + 1 + protowire.SizeBytes(inScope) + len(r.schemaURL)
	b = protowire.AppendVarint(append(b, tagResourceSpans), uint64(size))
	b = append(b, r.resource...)
	b = protowire.AppendVarint(append(b, tagScopeSpans), uint64(inScope))
	b = append(b, r.scope...)
	b = append(b, spans...)
	return append(b, r.schemaURL...)
}
