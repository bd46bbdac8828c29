package master

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // the codec that protocol takes the place of
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/lockstep-ccl/lockstep/collector/wire"
)

const (
	maxFirst   = 1 << 10 // bytes of hello, of an incident request
	maxNote    = 4 << 10 // bytes of notes about an incident
	spareConns = 256     // connections beyond one an agent: of remediators, and of agents that come anew
)

// guards are the server's options that bound what a peer can make it do. Its role is known
// before anything of a message is read, and a message's size before it is decoded.
func (m *Master) guards() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.InTapHandle(m.role),
		grpc.StreamInterceptor(firstIsSmall),
		grpc.ForceServerCodecV2(protocol{encoding.GetCodecV2("proto")}),
		grpc.RPCDecompressor(uncompressed{}), //nolint:staticcheck // SA1019: without one, whatever this program links in for its exporters is used
	}
}

// role refuses a call whose caller's certificate has not the role for it, or is
// of another job or trust domain.
func (m *Master) role(ctx context.Context, call *tap.Info) (context.Context, error) {
	switch call.FullMethodName {
	case wire.Collector_Progress_FullMethodName:
		return ctx, m.mayCall(ctx, func(id wire.Identity) error { return id.Agent(id.Node, m.o.Job) })
	case wire.Incidents_Incident_FullMethodName, wire.Notes_Note_FullMethodName, wire.Fences_Fence_FullMethodName:
		return ctx, m.mayCall(ctx, wire.Identity.Remediator)
	}
	return ctx, status.Errorf(codes.Unimplemented, "no method %.80q", call.FullMethodName)
}

// uncompressed refuses what is compressed: a few KiB could become MaxMessage.
type uncompressed struct{}

func (uncompressed) Type() string { return "gzip" }

func (uncompressed) Do(io.Reader) ([]byte, error) {
	return nil, errors.New("compressed messages are not taken")
}

// first bounds a message before protobuf decodes it.
type first struct{ m any }

type firstStream struct {
	grpc.ServerStream
	later bool
}

// firstIsSmall bounds the first message of a stream, which is hello.
func firstIsSmall(srv any, s grpc.ServerStream, _ *grpc.StreamServerInfo, h grpc.StreamHandler) error {
	return h(srv, &firstStream{ServerStream: s})
}

func (s *firstStream) RecvMsg(m any) error {
	if s.later {
		return s.ServerStream.RecvMsg(m)
	}
	s.later = true
	return s.ServerStream.RecvMsg(first{m})
}

// protocol is protobuf, for what a master takes.
type protocol struct{ encoding.CodecV2 }

func (p protocol) Unmarshal(data mem.BufferSlice, v any) error {
	most := wire.MaxMessage
	if f, ok := v.(first); ok {
		most, v = maxFirst, f.m
	}
	switch v.(type) {
	case *wire.IncidentRequest, *wire.FenceRequest:
		most = maxFirst
	case *wire.NoteRequest:
		most = maxNote
	}
	if data.Len() > most {
		return status.Errorf(codes.ResourceExhausted, "message of %d bytes, at most %d", data.Len(), most)
	}
	m, ok := v.(proto.Message)
	if !ok {
		return p.CodecV2.Unmarshal(data, v)
	}
	buf := data.MaterializeToBuffer(mem.DefaultBufferPool())
	defer buf.Free()
	if _, ok := v.(*wire.AgentMessage); ok {
		n, err := entries(buf.ReadOnlyData(), inMessage)
		if err != nil {
			return err
		}
		if n > wire.MaxEntries {
			return status.Errorf(codes.ResourceExhausted, "a report with more than %d entries", wire.MaxEntries)
		}
	}
	return proto.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(buf.ReadOnlyData(), m)
}

// within says which fields of a message count as entries, and which fields hold some.
type within struct {
	counts bool
	fields map[protowire.Number]*within
}

var (
	entry     = &within{counts: true}
	inMessage = &within{fields: map[protowire.Number]*within{2: inReport}}
	inReport  = &within{fields: map[protowire.Number]*within{
		7: {counts: true, fields: map[protowire.Number]*within{21: entry}}, // ranks and their calls
		8: entry, 9: entry, 10: entry, 13: entry,                           // members, connections, arrivals, traces
		20: {counts: true, fields: map[protowire.Number]*within{3: entry, 4: entry}}, // RAS, and ranks in it
		21: {counts: true, fields: map[protowire.Number]*within{7: entry}},           // NICs and their counters
	}}
)

// entries counts the entries in an encoded message without making any of them. It
// stops at the first one too many.
func entries(b []byte, in *within) (n int, err error) {
	for len(b) > 0 && n <= wire.MaxEntries {
		field, kind, size := protowire.ConsumeTag(b)
		if size < 0 {
			return n, protowire.ParseError(size)
		}
		b = b[size:]
		sub := in.fields[field]
		if sub == nil || kind != protowire.BytesType {
			if size = protowire.ConsumeFieldValue(field, kind, b); size < 0 {
				return n, protowire.ParseError(size)
			}
			b = b[size:]
			continue
		}
		value, size := protowire.ConsumeBytes(b)
		if size < 0 {
			return n, protowire.ParseError(size)
		}
		b = b[size:]
		if sub.counts {
			n++
		}
		if sub.fields != nil {
			more, err := entries(value, sub)
			if n += more; err != nil {
				return n, err
			}
		}
	}
	return n, nil
}
