package plannercmd

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/lockstep-ccl/lockstep/exporters/names"
	"github.com/lockstep-ccl/lockstep/exporters/prom"
	"github.com/lockstep-ccl/lockstep/pathplan"
	"github.com/lockstep-ccl/lockstep/pathplan/service"
)

// metrics is a planner's snapshot as it is exported, in bytes a second.
func metrics(s service.Snapshot) prom.Fabric {
	f := prom.Fabric{
		Moves: map[string]uint64{}, Refused: map[string]uint64{"certificate": s.Denied, "request": s.Refused, "handshake": s.Handshakes},
		Jobs: s.Jobs, Streams: s.Streams, Probers: s.Probers,
	}
	for r := pathplan.Dead; r <= pathplan.Returned; r++ {
		f.Moves[r.String()] = s.Moves[r]
	}
	for _, l := range s.Links {
		leaf, spine := l.Link.From, l.Link.To
		if !l.Up {
			leaf, spine = spine, leaf
		}
		f.Links = append(f.Links, prom.FabricLink{
			Leaf: leaf, Spine: spine, Up: l.Up, Index: int(l.Link.Index), Dead: l.State.Down, Loss: l.State.Loss,
			Rate: float64(l.Rate) / 8, Planned: float64(l.Planned) / 8, Measured: float64(l.Measured) / 8, Lanes: l.Lanes, Sent: l.Sent, Lost: l.Lost,
			Segments: l.Segments, SegmentsLost: l.SegmentsLost, Suspected: l.Suspected,
		})
	}
	return f
}

// decisions traces what a planner decides: a span for each look that moved lanes, with an
// event for each lane, and one for each link that was bad, from then until it is well.
type decisions struct{ trace.Tracer }

func (d decisions) decided(x service.Decision) {
	if len(x.Moves) == 0 {
		d.link(x)
		return
	}
	_, span := d.Start(context.Background(), "planner rebalance", trace.WithTimestamp(x.At), trace.WithAttributes(attribute.Int(names.AttrMoves, len(x.Moves))))
	for _, m := range x.Moves {
		span.AddEvent("lane moved", trace.WithTimestamp(x.At), trace.WithAttributes(
			attribute.String(names.AttrJob, m.Conn.Job), attribute.String(names.AttrConnection, m.Conn.Conn), attribute.Int(names.AttrLane, m.Lane),
			attribute.String(names.AttrPathFrom, m.From.String()), attribute.String(names.AttrPathTo, m.Path.String()), attribute.String(names.AttrReason, m.Reason.String())))
	}
	span.End(trace.WithTimestamp(x.At.Add(x.Took)))
}

func (d decisions) link(x service.Decision) {
	name, began := "link is bad", x.At
	if x.State == (pathplan.LinkState{}) {
		name, began = "link was bad", x.Since
	}
	_, span := d.Start(context.Background(), name, trace.WithTimestamp(began), trace.WithAttributes(
		attribute.String(names.AttrFabricLink, x.Link.String()), attribute.Bool(names.AttrFabricDead, x.State.Down), attribute.Float64(names.AttrFabricLoss, x.State.Loss)))
	if x.State != (pathplan.LinkState{}) {
		span.SetStatus(codes.Error, x.Link.String())
	}
	span.End(trace.WithTimestamp(x.At))
}
