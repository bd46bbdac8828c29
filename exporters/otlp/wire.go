package otlp

import (
	"encoding/binary"
	"math"
	"strings"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
)

// Field tags of opentelemetry/proto/trace/v1, one byte each but the last:
// number<<3 | wire type. Fields are written in the order of their numbers and
// varints in their shortest form, so the bytes are those that proto.Marshal
// would produce.
const (
	tagResourceSpans = 1<<3 | 2 // ExportTraceServiceRequest

	tagResource   = 1<<3 | 2 // ResourceSpans
	tagScopeSpans = 2<<3 | 2
	tagSchemaURL  = 3<<3 | 2 // of ResourceSpans and ScopeSpans

	tagScope = 1<<3 | 2 // ScopeSpans
	tagSpan  = 2<<3 | 2

	tagTraceID       = 1<<3 | 2 // Span
	tagSpanID        = 2<<3 | 2
	tagParentID      = 4<<3 | 2
	tagName          = 5<<3 | 2
	tagKind          = 6 << 3
	tagStart         = 7<<3 | 1
	tagEnd           = 8<<3 | 1
	tagAttribute     = 9<<3 | 2
	tagEvent         = 11<<3 | 2
	tagDroppedEvents = 12 << 3
	tagLink          = 13<<3 | 2
	tagStatus        = 15<<3 | 2
	tagFlags         = 16<<3 | 5 // two bytes

	tagEventTime      = 1<<3 | 1 // Event
	tagEventName      = 2<<3 | 2
	tagEventAttribute = 3<<3 | 2

	tagStatusMessage = 2<<3 | 2 // Status
	tagStatusCode    = 3 << 3

	tagKey   = 1<<3 | 2 // KeyValue
	tagValue = 2<<3 | 2

	tagString = 1<<3 | 2 // AnyValue
	tagBool   = 2 << 3
	tagInt    = 3 << 3
	tagDouble = 4<<3 | 1

	tagResourceAttribute = 1<<3 | 2 // Resource
	tagScopeName         = 1<<3 | 2 // InstrumentationScope
	tagScopeVersion      = 2<<3 | 2

	kindInternal = 1
	statusError  = 2

	flagSampled      = 0x01
	flagParentKnown  = 0x100 // the next bit is meaningful
	flagParentRemote = 0x200
	maxName          = 128 // bytes of a name that the trainer chose
)

func appendField(b []byte, tag byte, value []byte) []byte {
	return append(protowire.AppendVarint(append(b, tag), uint64(len(value))), value...)
}

func appendText(b []byte, tag byte, value string) []byte {
	return append(protowire.AppendVarint(append(b, tag), uint64(len(value))), value...)
}

func appendFixed64(b []byte, tag byte, v uint64) []byte {
	if v == 0 { // as proto3 does with every default
		return b
	}
	return binary.LittleEndian.AppendUint64(append(b, tag), v)
}

// appendString appends a string attribute. value must be valid UTF-8.
func appendString(b []byte, tag byte, key, value string) []byte {
	any := 1 + protowire.SizeBytes(len(value))
	b = protowire.AppendVarint(append(b, tag), uint64(1+protowire.SizeBytes(len(key))+1+protowire.SizeBytes(any)))
	b = appendText(b, tagKey, key)
	b = protowire.AppendVarint(append(b, tagValue), uint64(any))
	return appendText(b, tagString, value)
}

// The values below have at most eleven bytes, and their keys are ours and
// short, so that every length is one byte.

func appendInt(b []byte, tag byte, key string, v int64) []byte {
	any := 1 + protowire.SizeVarint(uint64(v))
	b = append(b, tag, byte(4+len(key)+any), tagKey, byte(len(key)))
	b = append(b, key...)
	b = append(b, tagValue, byte(any), tagInt)
	return protowire.AppendVarint(b, uint64(v))
}

func appendDouble(b []byte, tag byte, key string, v float64) []byte {
	b = append(b, tag, byte(4+len(key)+9), tagKey, byte(len(key)))
	b = append(b, key...)
	b = append(b, tagValue, 9, tagDouble)
	return binary.LittleEndian.AppendUint64(b, math.Float64bits(v))
}

func appendTrue(b []byte, tag byte, key string) []byte {
	b = append(b, tag, byte(4+len(key)+2), tagKey, byte(len(key)))
	b = append(b, key...)
	return append(b, tagValue, 2, tagBool, 1)
}

// clean makes a name that the trainer chose fit for protobuf: valid UTF-8 of
// bounded length.
func clean(s string) string {
	s = valid(s)
	if len(s) <= maxName {
		return s
	}
	end := maxName
	for !utf8.RuneStart(s[end]) {
		end--
	}
	return s[:end]
}

func valid(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }
