package otlp

import (
	"go.opentelemetry.io/otel/sdk/resource"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/lockstep-ccl/lockstep/exporters/names"
)

const scopeName = "github.com/lockstep-ccl/lockstep/ccl"

var scope = appendField(nil, tagScope, appendText(nil, tagScopeName, scopeName))

// jobResource is the part of a request that all spans of a job share: the
// process's resource and the job's name, encoded once.
type jobResource struct {
	resource  []byte // ResourceSpans.resource
	schemaURL []byte // ResourceSpans.schema_url
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
	r := &jobResource{resource: appendField(nil, tagResource, attrs)}
	if schema != "" {
		r.schemaURL = appendText(nil, tagSchemaURL, schema)
	}
	return r
}

// appendRequest appends to b one ResourceSpans of an ExportTraceServiceRequest.
// spans are fields of ScopeSpans.
func (r *jobResource) appendRequest(b, spans []byte) []byte {
	inScope := len(scope) + len(spans)
	size := len(r.resource) + 1 + protowire.SizeBytes(inScope) + len(r.schemaURL)
	b = protowire.AppendVarint(append(b, tagResourceSpans), uint64(size))
	b = append(b, r.resource...)
	b = protowire.AppendVarint(append(b, tagScopeSpans), uint64(inScope))
	b = append(b, scope...)
	b = append(b, spans...)
	return append(b, r.schemaURL...)
}
