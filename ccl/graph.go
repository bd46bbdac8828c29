package ccl

import (
	"errors"
	"fmt"

	"github.com/lockstep-ccl/lockstep/ccl/internal/cuda"
	"github.com/lockstep-ccl/lockstep/record"
)

// Graph is operations captured from a Stream, to be launched as one.
type Graph struct {
	graph *cuda.Graph
	exec  *cuda.Exec
	comms []*gpuMember // whose operations are in it
	of    *Stream      // holds the device that it was captured on
}

// Capture collects what fn calls on s, operations of communicators among it, in a
// CUDA graph instead of running it; d is the device of s. All ranks capture the
// same operations, and launch their graphs in the same order. Each launch is
// operations of their own in the records.
func (s *Stream) Capture(d Device, fn func() error) (_ *Graph, err error) {
	fail := func(err error) error { return fmt.Errorf("capture a graph: %w", err) }
	if s.gpu.stream == nil {
		if err := s.attach(d); err != nil {
			return nil, fail(err)
		}
	}
	cs, before := s.gpu.stream, s.gpu.comms
	if err := cs.BeginCapture(); err != nil {
		return nil, fail(err)
	}
	s.gpu.comms = nil
	err = fn()
	comms := s.gpu.comms
	s.gpu.comms = before // what is captured does not run
	graph, endErr := cs.EndCapture()
	if err != nil || endErr != nil {
		if graph != nil {
			err = errors.Join(err, graph.Close())
		}
		return nil, fail(errors.Join(err, endErr))
	}
	exec, err := graph.Instantiate()
	if err != nil {
		return nil, fail(errors.Join(err, graph.Close()))
	}
	return &Graph{graph, exec, comms, s}, nil
}

// Launch runs the graph on s, which must be of the device it was captured on: after
// the operations of its communicators that were called before, and before those that
// are called later, on whatever streams.
func (g *Graph) Launch(s *Stream) error {
	for _, c := range g.comms {
		if _, err := c.enter(record.Group, s); err != nil {
			return err
		}
	}
	if s.gpu.stream == nil {
		return fmt.Errorf("%w: launch a graph on a stream of no device", ErrInvalid)
	}
	on, runs := s.owned(s.gpu.stream), true
	for _, c := range g.comms {
		captured, err := c.comm.Begin(on)
		if err != nil {
			return c.launched(record.Group, err)
		}
		runs = !captured
	}
	if err := g.exec.Launch(s.gpu.stream); err != nil {
		return s.gpuFailed(err)
	}
	for _, c := range g.comms {
		if !runs {
			break // it is part of another graph now
		}
		if err := c.comm.End(on); err != nil {
			return c.launched(record.Group, err)
		}
	}
	return nil
}

// Close frees the graph, which must not be running.
func (g *Graph) Close() error { return errors.Join(g.exec.Close(), g.graph.Close()) }
