package replay_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	"github.com/lockstep-ccl/lockstep/diagnosis/replay"
)

// anything fills a value, its fields and theirs, with anything that it can hold;
// slices get what length says.
func anything(t *rapid.T, v reflect.Value, length func(field string) int, name string) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if counted(v, i) {
				continue
			}
			anything(t, v.Field(i), length, v.Type().Field(i).Name)
		}
	case reflect.Slice:
		n := length(name)
		if n == 0 {
			v.SetZero()
			return
		}
		v.Set(reflect.MakeSlice(v.Type(), n, n))
		for i := range n {
			anything(t, v.Index(i), length, name)
		}
	case reflect.Bool:
		v.SetBool(rapid.Bool().Draw(t, name))
	case reflect.String:
		v.SetString(rapid.StringMatching(`[a-zé→ ]{0,8}`).Draw(t, name))
	case reflect.Float32, reflect.Float64:
		v.SetFloat(float64(rapid.Float32().Draw(t, name)))
	default:
		bits := rapid.OneOf(rapid.SampledFrom([]int64{0, 0, 0, 1, -1, math.MaxInt64, math.MinInt64}), rapid.Int64Range(-1e9, 1e9), rapid.Int64()).Draw(t, name)
		if v.CanInt() {
			v.SetInt(reflect.ValueOf(bits).Convert(v.Type()).Int())
		} else {
			v.SetUint(reflect.ValueOf(bits).Convert(v.Type()).Uint())
		}
	}
}

// counted reports whether a field is not recorded: a master's count of changes, without
// which an engine looks at everything, or RAS's second opinion and NICs' counters, which change no verdict.
func counted(v reflect.Value, field int) bool {
	name := v.Type().Field(field).Name
	return v.Type() == reflect.TypeFor[diagnosis.Comm]() && (name == "Rev" || name == "ConnRev") || v.Type() == reflect.TypeFor[diagnosis.Evidence]() && (name == "RAS" || name == "NICs")
}

// fitting makes the indices of ev point to something, as a master's do.
func fitting(ev *diagnosis.Evidence) {
	mod := func(i int32, n int) int32 { return int32(uint32(i) % uint32(n)) }
	for i := range ev.Ranks {
		r := &ev.Ranks[i]
		r.Node = mod(r.Node, len(ev.Nodes)+1) - 1
		if len(r.Calls) > diagnosis.MaxCalls {
			r.Calls = r.Calls[:diagnosis.MaxCalls]
		}
	}
	for i := range ev.Comms {
		for k := range ev.Comms[i].Members {
			m := &ev.Comms[i].Members[k]
			m.World = mod(m.World, len(ev.Ranks)+1) - 1
		}
	}
	filled := slices.IndexFunc(ev.Comms, func(c diagnosis.Comm) bool { return len(c.Members) > 0 })
	if filled < 0 {
		ev.Conns = nil
	}
	if len(ev.Comms) == 0 {
		ev.Arrivals = nil
	}
	for i := range ev.Conns {
		k := &ev.Conns[i]
		if k.Comm = mod(k.Comm, len(ev.Comms)); len(ev.Comms[k.Comm].Members) == 0 {
			k.Comm = int32(filled)
		}
		n := len(ev.Comms[k.Comm].Members)
		k.Src, k.Dst = mod(k.Src, n), mod(k.Dst, n)
	}
	for i := range ev.Arrivals {
		a := &ev.Arrivals[i]
		a.Comm = mod(a.Comm, len(ev.Comms))
		n := len(ev.Comms[a.Comm].Members)
		a.Start, a.End = append(a.Start, make([]int64, n)...)[:n], append(a.End, make([]int64, n)...)[:n]
	}
}

// clone copies a value, and what its slices hold.
func clone[T any](v T) T {
	out := reflect.New(reflect.TypeFor[T]()).Elem()
	deepCopy(out, reflect.ValueOf(v))
	return out.Interface().(T)
}

func deepCopy(to, from reflect.Value) {
	switch from.Kind() {
	case reflect.Struct:
		for i := range from.NumField() {
			deepCopy(to.Field(i), from.Field(i))
		}
	case reflect.Slice:
		if from.IsNil() {
			return
		}
		to.Set(reflect.MakeSlice(from.Type(), from.Len(), from.Len()))
		for i := range from.Len() {
			deepCopy(to.Index(i), from.Index(i))
		}
	default:
		to.Set(from)
	}
}

// change makes the next evidence out of ev.
func change(t *rapid.T, ev *diagnosis.Evidence) {
	length := func(string) int { return rapid.IntRange(0, 4).Draw(t, "length") }
	v := reflect.ValueOf(ev).Elem()
	ev.Now += rapid.Int64Range(-1e6, 1e9).Draw(t, "passed")
	ev.Paused = rapid.Bool().Draw(t, "paused")
	for range rapid.IntRange(0, 6).Draw(t, "changes") {
		// One table: an entry changes, comes, goes, or all are shuffled.
		table := v.FieldByName(rapid.SampledFrom([]string{"Nodes", "Ranks", "Comms", "Conns", "Arrivals"}).Draw(t, "table"))
		n := table.Len()
		switch op := rapid.IntRange(0, 5).Draw(t, "op"); {
		case op <= 1 && n > 0:
			anything(t, table.Index(rapid.IntRange(0, n-1).Draw(t, "entry")), length, "")
		case op == 2:
			e := reflect.New(table.Type().Elem()).Elem()
			anything(t, e, length, "")
			table.Set(reflect.Append(table, e))
		case op == 3 && n > 0:
			i := rapid.IntRange(0, n-1).Draw(t, "entry")
			table.Set(reflect.AppendSlice(table.Slice3(0, i, i), table.Slice(i+1, n)))
		case op == 4 && n > 0: // the front, as old arrivals go
			table.Set(table.Slice(rapid.IntRange(0, n).Draw(t, "dropped"), n))
		case op == 5 && n > 1:
			i, j := rapid.IntRange(0, n-1).Draw(t, "entry"), rapid.IntRange(0, n-1).Draw(t, "other")
			reflect.Swapper(table.Interface())(i, j)
		}
	}
	fitting(ev)
}

type written struct {
	number uint64
	ev     diagnosis.Evidence
	told   []diagnosis.Verdict
}

func readAll(t interface{ Fatal(...any) }, b []byte) (out []written, damage replay.Damage) {
	r, err := replay.NewReader(bytes.NewReader(b), replay.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	for {
		p, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out, r.Damage()
		}
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, written{p.Number, clone(*p.Evidence), clone(p.Told)})
	}
}

var exact = cmp.Options{cmpopts.EquateEmpty(), cmp.AllowUnexported(written{}), cmpopts.EquateNaNs()}

// TestRoundTrip writes any sequence of evidence and verdicts, in one segment or
// several, and reads the same.
func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		ev := diagnosis.Evidence{Job: "job"}
		anything(t, reflect.ValueOf(&ev).Elem(), func(string) int { return rapid.IntRange(0, 5).Draw(t, "length") }, "")
		fitting(&ev)
		var file bytes.Buffer
		h := replay.Header{Job: ev.Job, Run: 7, Segment: 1}
		w, err := replay.NewWriter(&file, h)
		if err != nil {
			t.Fatal(err)
		}
		var want []written
		var told, kept []diagnosis.Verdict // what is said, and what is to be read: sentences as of the last change of the rest
		number := uint64(0)
		for range rapid.IntRange(1, 8).Draw(t, "passes") {
			rotate := rapid.IntRange(0, 3).Draw(t, "rotate") == 0
			if rotate {
				if h.Segment++; w.Segment(&file, h) != nil {
					t.Fatal("segment")
				}
			}
			if len(told) > 0 && rapid.Bool().Draw(t, "reword") {
				told[0].Why = []string{"another sentence"}
			}
			if rapid.Bool().Draw(t, "tell") {
				told = make([]diagnosis.Verdict, rapid.IntRange(0, 3).Draw(t, "verdicts"))
				for i := range told {
					anything(t, reflect.ValueOf(&told[i]).Elem(), func(string) int { return rapid.IntRange(0, 3).Draw(t, "length") }, "")
				}
			}
			number += rapid.Uint64Range(1, 3).Draw(t, "number")
			if err := w.Write(number, &ev, told); err != nil {
				t.Fatal(err)
			}
			if rotate || number == 0 || !slices.EqualFunc(told, kept, func(a, b diagnosis.Verdict) bool {
				return a.Key == b.Key && a.Class == b.Class && a.Level == b.Level && slices.Equal(a.Culprits, b.Culprits)
			}) {
				kept = clone(told)
			}
			want = append(want, written{number, clone(ev), kept})
			change(t, &ev)
		}
		got, damage := readAll(t, file.Bytes())
		if damage != (replay.Damage{}) {
			t.Fatalf("damage in a whole file: %+v", damage)
		}
		if diff := cmp.Diff(want, got, exact); diff != "" {
			t.Fatalf("-written +read:\n%s", diff)
		}
	})
}

// filled returns a value without a zero in it: what is not carried is seen.
func filled[T any]() T {
	var v T
	n := int64(0)
	var fill func(v reflect.Value)
	fill = func(v reflect.Value) {
		n++
		switch v.Kind() {
		case reflect.Struct:
			for i := range v.NumField() {
				if !counted(v, i) {
					fill(v.Field(i))
				}
			}
		case reflect.Slice:
			v.Set(reflect.MakeSlice(v.Type(), 2, 2))
			fill(v.Index(0))
			fill(v.Index(1))
		case reflect.Bool:
			v.SetBool(true)
		case reflect.String:
			v.SetString("s")
		case reflect.Float32, reflect.Float64:
			v.SetFloat(float64(n) + 0.5)
		default:
			if v.CanInt() {
				v.SetInt(n%100 + 1)
			} else {
				v.SetUint(uint64(n)%100 + 1)
			}
		}
	}
	fill(reflect.ValueOf(&v).Elem())
	return v
}

// TestEveryField fails when Evidence, Verdict or Config has a field that no
// recording carries: give it a column (columns.go) or a field (verdict.go), and
// one in evidence.proto.
func TestEveryField(t *testing.T) {
	ev := filled[diagnosis.Evidence]()
	fitting(&ev)
	ev.Ranks[0].Node = 1
	for i := range ev.Arrivals {
		ev.Arrivals[i].Comm = int32(i)
	}
	told := []diagnosis.Verdict{filled[diagnosis.Verdict]()}
	config := filled[diagnosis.Config]()
	before := clone(ev)
	before.Ranks, before.Comms, before.Conns, before.Arrivals = nil, nil, nil, nil
	var file bytes.Buffer
	w, err := replay.NewWriter(&file, replay.Header{Config: config})
	if err != nil {
		t.Fatal(err)
	}
	for i, e := range []diagnosis.Evidence{ev, before, ev} { // in a key frame, and as a change
		if err := w.Write(uint64(i+1), &e, told); err != nil {
			t.Fatal(err)
		}
	}
	got, _ := readAll(t, file.Bytes())
	for i, want := range []diagnosis.Evidence{ev, before, ev} {
		if diff := cmp.Diff(written{uint64(i + 1), want, told}, got[i], exact); diff != "" {
			t.Errorf("not carried (-written +read):\n%s", diff)
		}
	}
	r, err := replay.NewReader(bytes.NewReader(file.Bytes()), replay.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(config, r.Header().Config); diff != "" || len(r.Header().Unknown) > 0 {
		t.Errorf("of the configuration, not carried (-written +read): %v\n%s", r.Header().Unknown, diff)
	}
}

// recording is three segments of four passes each; ends are their lengths in the file.
func recording(t testing.TB) (file []byte, ends []int, passes []written) {
	t.Helper()
	var b bytes.Buffer
	h := replay.Header{Job: "job", Run: 1, Created: time.Unix(1, 0)}
	var w *replay.Writer
	ev := filled[diagnosis.Evidence]()
	fitting(&ev)
	for i := range uint64(12) {
		if i%4 == 0 {
			h.Segment++
			var err error
			if w == nil {
				w, err = replay.NewWriter(&b, h)
			} else {
				err = w.Segment(&b, h)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		ev.Now += 1e8
		ev.Comms[0].Members[0].Finished += i
		if err := w.Write(i+1, &ev, nil); err != nil {
			t.Fatal(err)
		}
		passes = append(passes, written{i + 1, clone(ev), nil})
		if i%4 == 3 {
			ends = append(ends, b.Len())
		}
	}
	return b.Bytes(), ends, passes
}

// TestTorn cuts a recording at every byte: what was written whole is read.
func TestTorn(t *testing.T) {
	file, _, passes := recording(t)
	last := 0
	for n := range file {
		r, err := replay.NewReader(bytes.NewReader(file[:n]), replay.Limits{})
		if err != nil {
			if last > 0 || !errors.Is(err, replay.ErrNoRecording) {
				t.Fatalf("cut at %d: %v", n, err)
			}
			continue
		}
		count := 0
		for {
			p, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("cut at %d: %v", n, err)
			}
			if p.Number != passes[count].number || p.Evidence.Now != passes[count].ev.Now {
				t.Fatalf("cut at %d: pass %d at %d, want %d", n, p.Number, p.Evidence.Now, passes[count].number)
			}
			count++
		}
		if count < last || count > last+1 {
			t.Fatalf("cut at %d: %d passes, one byte earlier %d", n, count, last)
		}
		last = count
	}
	if last != len(passes)-1 {
		t.Errorf("%d passes of %d are whole when the last byte is missing", last, len(passes))
	}
}

// TestDamage tears a segment in the middle of a file, as a master that is killed does,
// and damages bytes: the segments around are read, and the loss is told.
func TestDamage(t *testing.T) {
	file, ends, passes := recording(t)
	torn := append(slices.Clone(file[:ends[1]-10]), file[ends[1]:]...)
	got, damage := readAll(t, torn)
	if diff := cmp.Diff(append(slices.Clone(passes[:7]), passes[8:]...), got, exact); diff != "" {
		t.Errorf("torn (-written +read):\n%s", diff)
	}
	if damage.Places == 0 || damage.Bytes == 0 || damage.Bytes > int64(ends[1]-ends[0]) {
		t.Errorf("damage %+v", damage)
	}
	for at := range file {
		bad := slices.Clone(file)
		bad[at] ^= 0x55
		r, err := replay.NewReader(bytes.NewReader(bad), replay.Limits{})
		if err != nil {
			if at >= ends[0] {
				t.Fatalf("damaged at %d: %v", at, err)
			}
			continue
		}
		n := 0
		for {
			p, err := r.Next()
			if err != nil {
				if !errors.Is(err, io.EOF) && !errors.Is(err, replay.ErrVersion) {
					t.Fatalf("damaged at %d: %v", at, err)
				}
				break
			}
			if want := passes[p.Number-1]; p.Evidence.Now != want.ev.Now {
				t.Fatalf("damaged at %d: pass %d is not what was written", at, p.Number)
			}
			n++
		}
		if n == len(passes) {
			t.Errorf("damaged at %d: nothing is missing", at)
		}
	}
}

// TestLimits: a reader keeps no more than it was told to.
func TestLimits(t *testing.T) {
	file, _, _ := recording(t)
	for name, l := range map[string]replay.Limits{
		"nodes": {Nodes: 1}, "ranks": {Ranks: 1}, "communicators": {Comms: 1}, "members": {Members: 3}, "connections": {Conns: 1}, "cells": {Cells: 3},
	} {
		r, err := replay.NewReader(bytes.NewReader(file), l)
		if err != nil {
			t.Fatal(err)
		}
		if _, err = r.Next(); err == nil || errors.Is(err, io.EOF) {
			t.Errorf("%s: read beyond the limit (%v)", name, err)
		}
	}
}

// FuzzReader: no bytes make a reader fail otherwise than by an error, or keep more
// than its limits allow, and an engine can judge all that it passes.
func FuzzReader(f *testing.F) {
	file, ends, _ := recording(f)
	f.Add(file)
	f.Add(file[:ends[0]])
	f.Add(file[:ends[0]-3])
	f.Fuzz(func(t *testing.T, b []byte) {
		l := replay.Limits{Nodes: 16, Ranks: 64, Comms: 16, Members: 256, Conns: 256, Cells: 1024}
		r, err := replay.NewReader(bytes.NewReader(b), l)
		if err != nil {
			return
		}
		for range 64 {
			p, err := r.Next()
			if err != nil {
				return
			}
			if ev := p.Evidence; len(ev.Nodes) > l.Nodes || len(ev.Ranks) > l.Ranks || len(ev.Comms) > l.Comms || len(ev.Conns) > l.Conns {
				t.Fatal("more than the limits allow")
			}
		}
	})
}

// FuzzParts is FuzzReader behind the checksum: the fuzzer's bytes are what frames hold,
// and engines judge what comes of them.
func FuzzParts(f *testing.F) {
	file, _, _ := recording(f)
	var seed []byte
	for at := 0; at < len(file); { // kind, length, payload of each frame
		n := int(binary.LittleEndian.Uint32(file[at+8:]))
		if file[at+6] == 0 {
			seed = append(append(seed, file[at+5], byte(n), byte(n>>8)), file[at+20:at+20+n]...)
		}
		at += 20 + n
	}
	f.Add(seed)
	f.Fuzz(func(t *testing.T, b []byte) {
		file := replay.Frame(1, nil)
		for len(b) >= 3 {
			n := min(int(b[1])|int(b[2])<<8, len(b)-3)
			file = append(file, replay.Frame(b[0], b[3:3+n])...)
			b = b[3+n:]
		}
		r, err := replay.NewReader(bytes.NewReader(file), replay.Limits{Nodes: 16, Ranks: 64, Comms: 16, Members: 256, Conns: 256, Cells: 1024})
		if err != nil {
			t.Fatal(err)
		}
		for {
			if _, err := r.Next(); err != nil {
				return
			}
		}
	})
}
