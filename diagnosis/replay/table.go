package replay

import (
	"errors"
	"fmt"
	"slices"

	"github.com/lockstep-ccl/lockstep/diagnosis"
	pb "github.com/lockstep-ccl/lockstep/diagnosis/replay/internal/evidencepb"
)

// table is how one table of the state becomes a message of columns, and back.
type table[T, M any] struct {
	what    string
	columns []column[T, M]
	rows    func(*M) *[]uint32
	name    func(*T) *string                // nil: entries have no name
	names   func(*M) (*[]uint32, *[]string) // likewise
	same    func(a, b *T) bool              // nil: the columns decide
	put     func(*pb.Part, *M)              // what encodes
	get     func(*pb.Part) *M               // what decodes
	of      func(*state) []T
}

var (
	nodeTable = table[diagnosis.Node, pb.Nodes]{
		what: "nodes", columns: nodeColumns, rows: func(m *pb.Nodes) *[]uint32 { return &m.Row },
		name:  func(t *diagnosis.Node) *string { return &t.Name },
		names: func(m *pb.Nodes) (*[]uint32, *[]string) { return &m.Named, &m.Name },
		same:  func(a, b *diagnosis.Node) bool { return *a == *b },
		put:   func(p *pb.Part, m *pb.Nodes) { p.Nodes = m }, get: (*pb.Part).GetNodes,
		of: func(s *state) []diagnosis.Node { return s.nodes },
	}
	rankTable = table[diagnosis.Rank, pb.Ranks]{
		what: "ranks", columns: rankColumns, rows: func(m *pb.Ranks) *[]uint32 { return &m.Row },
		put: func(p *pb.Part, m *pb.Ranks) { p.Ranks = m }, get: (*pb.Part).GetRanks,
		of: func(s *state) []diagnosis.Rank { return s.ranks },
	}
	commTable = table[comm, pb.Comms]{
		what: "communicators", columns: commColumns, rows: func(m *pb.Comms) *[]uint32 { return &m.Row },
		name:  func(t *comm) *string { return &t.name },
		names: func(m *pb.Comms) (*[]uint32, *[]string) { return &m.Named, &m.Name },
		same:  func(a, b *comm) bool { return *a == *b },
		put:   func(p *pb.Part, m *pb.Comms) { p.Comms = m }, get: (*pb.Part).GetComms,
		of: func(s *state) []comm { return s.comms },
	}
	memberTable = table[diagnosis.Member, pb.Members]{
		what: "members", columns: memberColumns, rows: func(m *pb.Members) *[]uint32 { return &m.Row },
		same: func(a, b *diagnosis.Member) bool { return *a == *b },
		put:  func(p *pb.Part, m *pb.Members) { p.Members = m }, get: (*pb.Part).GetMembers,
		of: func(s *state) []diagnosis.Member { return s.members },
	}
	connTable = table[diagnosis.Conn, pb.Conns]{
		what: "connections", columns: connColumns, rows: func(m *pb.Conns) *[]uint32 { return &m.Row },
		name:  func(t *diagnosis.Conn) *string { return &t.Name },
		names: func(m *pb.Conns) (*[]uint32, *[]string) { return &m.Named, &m.Name },
		same:  func(a, b *diagnosis.Conn) bool { return *a == *b },
		put:   func(p *pb.Part, m *pb.Conns) { p.Conns = m }, get: (*pb.Part).GetConns,
		of: func(s *state) []diagnosis.Conn { return s.conns },
	}
	arrivalTable = table[arrival, pb.Arrivals]{
		what: "arrivals", columns: arrivalColumns, rows: func(m *pb.Arrivals) *[]uint32 { return &m.Row },
		same: func(a, b *arrival) bool { return *a == *b },
		put:  func(p *pb.Part, m *pb.Arrivals) { p.Arrivals = m }, get: (*pb.Part).GetArrivals,
		of: func(s *state) []arrival { return s.arrivals },
	}
	startTable = table[int64, pb.Times]{
		what: "starts", columns: timeColumns, rows: func(m *pb.Times) *[]uint32 { return &m.Row },
		same: func(a, b *int64) bool { return *a == *b },
		put:  func(p *pb.Part, m *pb.Times) { p.Starts = m }, get: (*pb.Part).GetStarts,
		of: func(s *state) []int64 { return s.starts },
	}
	endTable = table[int64, pb.Times]{
		what: "ends", columns: timeColumns, rows: func(m *pb.Times) *[]uint32 { return &m.Row },
		same: func(a, b *int64) bool { return *a == *b },
		put:  func(p *pb.Part, m *pb.Times) { p.Ends = m }, get: (*pb.Part).GetEnds,
		of: func(s *state) []int64 { return s.ends },
	}
)

// changed reports whether an entry differs.
func (t *table[T, M]) changed(a, b *T) bool {
	if t.same != nil {
		return !t.same(a, b)
	}
	for i := range t.columns {
		if c := &t.columns[i]; c.get(a) != c.get(b) {
			return true
		}
	}
	return false
}

// Codes of a time column; see evidence.proto.
const (
	timeSame = iota
	timeNever
	timeRaw
	timeAgo
)

// farTime is the distance from which a time is written as it is.
const farTime = int64(1) << 60

func appendTime(out []int64, was, is, now int64) []int64 {
	switch ago := now - is; {
	case is == was:
		return append(out, timeSame)
	case is == 0:
		return append(out, timeNever)
	case ago >= farTime || ago <= -farTime:
		return append(out, timeRaw, is)
	case ago < 0:
		return append(out, ago)
	default:
		return append(out, ago+timeAgo)
	}
}

var errColumn = errors.New("a column that is too short or too long")

// readTime returns the next time of a column, and what follows.
func readTime(in []int64, was, now int64) (int64, []int64, error) {
	if len(in) == 0 {
		return 0, nil, errColumn
	}
	code, in := in[0], in[1:]
	switch {
	case code == timeSame:
		return was, in, nil
	case code == timeNever:
		return 0, in, nil
	case code == timeRaw:
		if len(in) == 0 {
			return 0, nil, errColumn
		}
		return in[0], in[1:], nil
	case code < 0:
		return now - code, in, nil
	default:
		return now - (code - timeAgo), in, nil
	}
}

// encode writes the given rows of cur, as changes from old, over msg.
func (t *table[T, M]) encode(msg *M, rows []int32, old, cur []T, now int64) {
	out := t.rows(msg)
	*out = (*out)[:0]
	last := int32(0)
	for _, i := range rows {
		*out = append(*out, uint32(i-last))
		last = i
	}
	var none T
	was := func(i int32) *T {
		if int(i) < len(old) {
			return &old[i]
		}
		return &none
	}
	for c := range t.columns {
		c := &t.columns[c]
		get, out := c.get, c.values(msg)
		v := (*out)[:0]
		// Most columns stay as they are, and are left out.
		if slices.ContainsFunc(rows, func(i int32) bool { return get(was(i)) != get(&cur[i]) }) {
			for _, i := range rows {
				before, after := get(was(i)), get(&cur[i])
				if c.time {
					v = appendTime(v, int64(before), int64(after), now)
				} else {
					v = append(v, int64(after-before))
				}
			}
		}
		*out = v
	}
	if t.name == nil {
		return
	}
	at, names := t.names(msg)
	*at, *names = (*at)[:0], (*names)[:0]
	for k, i := range rows {
		name, was := *t.name(&cur[i]), ""
		if int(i) < len(old) {
			was = *t.name(&old[i])
		}
		if name != was {
			*at, *names = append(*at, uint32(k)), append(*names, name)
		}
	}
}

// decode applies the message's rows to s; nil is none.
func (t *table[T, M]) decode(p *pb.Part, s *state, rows []int32) ([]int32, error) {
	msg := t.get(p)
	if msg == nil {
		return rows, nil
	}
	entries := t.of(s)
	rows, err := readRows(rows[:0], *t.rows(msg), len(entries))
	if err != nil {
		return rows, fmt.Errorf("%s: %w", t.what, err)
	}
	for c := range t.columns {
		c := &t.columns[c]
		v := *c.values(msg)
		if len(v) == 0 {
			continue
		}
		if !c.time && len(v) != len(rows) {
			return rows, fmt.Errorf("%s: %w", t.what, errColumn)
		}
		for k, i := range rows {
			e := &entries[i]
			if !c.time {
				c.set(e, c.get(e)+uint64(v[k]))
				continue
			}
			var at int64
			if at, v, err = readTime(v, int64(c.get(e)), p.Now); err != nil {
				return rows, fmt.Errorf("%s: %w", t.what, err)
			}
			c.set(e, uint64(at))
		}
		if c.time && len(v) != 0 {
			return rows, fmt.Errorf("%s: %w", t.what, errColumn)
		}
	}
	if t.name == nil {
		return rows, nil
	}
	at, names := t.names(msg)
	if len(*at) != len(*names) {
		return rows, fmt.Errorf("%s: %w", t.what, errColumn)
	}
	for k, r := range *at {
		if int(r) >= len(rows) {
			return rows, fmt.Errorf("%s: a name of no row", t.what)
		}
		*t.name(&entries[rows[r]]) = (*names)[k]
	}
	return rows, nil
}

// readRows turns distances into indices below n, which ascend.
func readRows(rows []int32, gaps []uint32, n int) ([]int32, error) {
	at := int64(0)
	for k, gap := range gaps {
		if at += int64(gap); at >= int64(n) || gap == 0 && k > 0 {
			return rows, errors.New("rows that do not exist or do not ascend")
		}
		rows = append(rows, int32(at))
	}
	return rows, nil
}

// encodeCalls writes the calls of the given ranks over msg.
func encodeCalls(msg *pb.Calls, ranks []int32, cur []diagnosis.Rank, now int64) {
	msg.Row, msg.Count = msg.Row[:0], msg.Count[:0]
	last := int32(0)
	for _, i := range ranks {
		msg.Row, msg.Count = append(msg.Row, uint32(i-last)), append(msg.Count, uint32(len(cur[i].Calls)))
		last = i
	}
	for c := range callColumns {
		c := &callColumns[c]
		v, was := (*c.values(msg))[:0], uint64(0)
		for _, i := range ranks {
			for k := range cur[i].Calls {
				is := c.get(&cur[i].Calls[k])
				if c.time {
					v = appendTime(v, int64(was), int64(is), now)
				} else {
					v = append(v, int64(is-was))
				}
				was = is
			}
		}
		*c.values(msg) = v
	}
}

// decodeCalls gives ranks new lists of calls.
func decodeCalls(msg *pb.Calls, s *state, now int64) error {
	if msg == nil {
		return nil
	}
	rows, err := readRows(nil, msg.Row, len(s.ranks))
	if err != nil || len(msg.Count) != len(rows) {
		return errors.Join(errors.New("calls of no rank"), err)
	}
	total := 0
	for _, n := range msg.Count {
		if n > diagnosis.MaxCalls {
			return fmt.Errorf("%d calls of a rank, at most %d are read", n, diagnosis.MaxCalls)
		}
		total += int(n)
	}
	// Each call has an element in each column.
	if total != len(msg.Seq) {
		return fmt.Errorf("calls: %w", errColumn)
	}
	calls := make([]diagnosis.Call, total)
	for c := range callColumns {
		c := &callColumns[c]
		v, was := *c.values(msg), uint64(0)
		if len(v) == 0 {
			continue // of a writer that does not know it
		}
		if !c.time && len(v) != total {
			return fmt.Errorf("calls: %w", errColumn)
		}
		for k := range calls {
			if c.time {
				var at int64
				if at, v, err = readTime(v, int64(was), now); err != nil {
					return fmt.Errorf("calls: %w", err)
				}
				was = uint64(at)
			} else {
				was += uint64(v[k])
			}
			c.set(&calls[k], was)
		}
		if c.time && len(v) != 0 {
			return fmt.Errorf("calls: %w", errColumn)
		}
	}
	for k, i := range rows {
		n := int(msg.Count[k])
		s.ranks[i].Calls = nil
		if n > 0 {
			s.ranks[i].Calls = slices.Clip(calls[:n])
		}
		calls = calls[n:]
	}
	return nil
}
