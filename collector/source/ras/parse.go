package ras

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/lockstep-ccl/lockstep/collector"
)

// maxAnswer bounds what is read of an answer: 100,000 ranks in JSON are about 60 MB,
// of which the first ranks are enough.
const maxAnswer = 16 << 20

// ErrAnswer is what Parse's errors wrap: the answer is none of RAS.
var ErrAnswer = errors.New("no answer of NCCL's RAS")

// Parse reads an answer to VERBOSE STATUS, in JSON or text, of any version. An answer that
// was cut short gives what had come.
func Parse(answer []byte) (*collector.RAS, error) {
	answer = bytes.TrimLeft(answer, " \t\r\n")
	switch {
	case len(answer) == 0:
		return nil, fmt.Errorf("%w: it is empty", ErrAnswer)
	case answer[0] == '{':
		return parseJSON(answer)
	}
	return parseText(answer)
}

// parseJSON reads word by word, and keeps what it returns and a few words of each rank: memory is bounded
// whatever somebody writes. Of a communicator that was cut short the ranks that had come count.
func parseJSON(answer []byte) (*collector.RAS, error) {
	out := &collector.RAS{}
	d := json.NewDecoder(bytes.NewReader(withCommas(answer)))
	if _, err := d.Token(); err != nil { // {
		return nil, fmt.Errorf("%w: %w", ErrAnswer, err)
	}
	known := false
	for d.More() {
		name, err := d.Token()
		if err != nil {
			break // cut short
		}
		switch name {
		case "nccl_version":
			known = true
			err = d.Decode(&out.Version)
		case "communicators":
			known = true
			err = list(d, func() error { return parseComm(d, out) })
		default:
			err = skip(d)
		}
		if err != nil {
			if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
				break
			}
			return nil, fmt.Errorf("%w: %w", ErrAnswer, err)
		}
	}
	if !known {
		return nil, fmt.Errorf("%w: neither nccl_version nor communicators", ErrAnswer)
	}
	out.Version = printable(out.Version)
	return out, nil
}

// withCommas is an answer with the commas that are missing in it: NCCL 2.28 forgets the one
// after a missing rank's nvml_dev, so that its JSON is none when it matters.
func withCommas(answer []byte) []byte {
	var out []byte
	done := 0 // so much of answer is in out
	var inString, escaped bool
	ended := -1 // where a value ended after which nothing but white space has come
	for i, b := range answer {
		if inString {
			switch {
			case escaped:
				escaped = false
			case b == '\\':
				escaped = true
			case b == '"':
				inString, ended = false, i+1
			}
			continue
		}
		switch b {
		case ' ', '\t', '\r', '\n':
		case ',', ':', '{', '[':
			ended = -1
		case '"', '}', ']':
			if b == '"' && ended >= 0 {
				out = append(append(out, answer[done:ended]...), ',')
				done = ended
			}
			inString, ended = b == '"', i+1
		default:
			ended = i + 1
		}
	}
	if out == nil {
		return answer
	}
	return append(out, answer[done:]...)
}

// list calls each at every element of a list, object at every value of an object: it is to be read there.
// Something else in its place is an error, null is an empty one.
func list(d *json.Decoder, each func() error) error {
	return within(d, '[', each)
}

func object(d *json.Decoder, each func(name string) error) error {
	return within(d, '{', func() error {
		name, err := d.Token()
		if err != nil {
			return err
		}
		s, _ := name.(string) // of an object it is one
		return each(s)
	})
}

func within(d *json.Decoder, begin json.Delim, each func() error) error {
	switch t, err := d.Token(); {
	case err != nil:
		return err
	case t == nil:
		return nil
	case t != begin:
		return fmt.Errorf("%v, want %v", t, begin)
	}
	for d.More() {
		if err := each(); err != nil {
			return err
		}
	}
	_, err := d.Token()
	return err
}

func skip(d *json.Decoder) error {
	var passed json.RawMessage
	return d.Decode(&passed)
}

// parseComm reads a communicator; fields that are not here are passed over.
func parseComm(d *json.Decoder, out *collector.RAS) error {
	var c collector.RASComm
	var hash string
	kinds := launches{}
	err := object(d, func(name string) error {
		switch name {
		case "hash":
			return d.Decode(&hash)
		case "size":
			var size int64
			err := d.Decode(&size)
			c.Size = rank(size)
			return err
		case "ranks":
			return list(d, func() error { return kinds.parse(d) })
		case "missing_ranks":
			return list(d, func() error { return parseMissing(d, &c) })
		}
		return skip(d)
	})
	id, e := strconv.ParseUint(strings.TrimPrefix(hash, "0x"), 16, 64)
	if e != nil || len(out.Comms) == collector.MaxRASComms { // of no use, or one too many
		return err
	}
	c.ID = id
	kinds.tell(&c)
	out.Comms = append(out.Comms, c)
	return err
}

func parseMissing(d *json.Decoder, c *collector.RASComm) error {
	var number, pid int64
	var status struct {
		Unresponsive *bool `json:"unresponsive"`
		Dead         bool  `json:"considered_dead"`
	}
	err := object(d, func(name string) error {
		switch name {
		case "rank":
			return d.Decode(&number)
		case "pid":
			return d.Decode(&pid)
		case "status":
			return d.Decode(&status)
		}
		return skip(d)
	})
	if err != nil {
		return err
	}
	if status.Unresponsive == nil || *status.Unresponsive || status.Dead { // else it answers, and is not in this communicator: it joins or leaves
		c.Miss(collector.RASRank{Rank: rank(number), PID: rank(pid), Dead: status.Dead})
	}
	return nil
}

// launches are how many operations of a kind ranks have launched, at most of maxKinds.
type launches map[string][]launch

type launch struct {
	rank int32
	n    uint64
}

const maxKinds = 64

// parse reads one rank.
func (l launches) parse(d *json.Decoder) error {
	var number int64
	counts := map[string]uint64{}
	err := object(d, func(name string) error {
		switch name {
		case "rank":
			return d.Decode(&number)
		case "collective_counts":
			return object(d, func(kind string) error {
				var n uint64
				err := d.Decode(&n)
				if _, ok := counts[kind]; ok || len(counts) < maxKinds {
					counts[kind] = n
				}
				return err
			})
		}
		return skip(d)
	})
	if err != nil {
		return err
	}
	for kind, n := range counts {
		if _, ok := l[kind]; ok || len(l) < maxKinds {
			l[kind] = append(l[kind], launch{rank(number), n})
		}
	}
	return nil
}

// tell adds the ranks that are behind, kind by kind.
func (l launches) tell(c *collector.RASComm) {
	for _, kind := range slices.Sorted(maps.Keys(l)) {
		most := slices.MaxFunc(l[kind], func(a, b launch) int { return cmp.Compare(a.n, b.n) }).n
		for _, x := range l[kind] {
			if x.n < most {
				c.FallBehind(collector.RASBehind{Rank: x.rank, Coll: printable(kind), Launched: x.n, Most: most})
			}
		}
	}
}

// rank is a number that can be a rank or a pid, -1 when it cannot.
func rank(n int64) int32 {
	if n < 0 || n > 1<<30 {
		return -1
	}
	return int32(n)
}

// The lines of the text answer that say something, from src/ras/client_support.cc.
var (
	version  = regexp.MustCompile(`^NCCL version (\S+)`)
	heading  = regexp.MustCompile(`^\s*#\d+-\d+ \(([0-9a-fA-F]{1,16})\) (INCOMPLETE|ERROR|MISMATCH)`)
	oneRank  = regexp.MustCompile(`^\s+Rank (\d+)\b`)
	inLine   = regexp.MustCompile(`^\s+The missing ranks?: ([0-9, -]+)`) // 2.24
	process  = regexp.MustCompile(`managed by process (\d+)`)
	differs  = regexp.MustCompile(`^\s+Communicator ranks have different (?:collective |(\w+) )operation counts`)
	ofStatus = regexp.MustCompile(`^\s+Communicator ranks have different status`)
	launched = regexp.MustCompile(`(?:(\d+) ranks have|Rank (\d+) has) (?:launched up to operation (\d+)|not launched any operations)`)
	section  = regexp.MustCompile(`^(INCOMPLETE|DEAD|TIMEOUT|Errors|Warnings|Communicators)`)
	ended    = regexp.MustCompile(`^\s+Process (\d+) on node`)
)

// parseText reads the answer that is meant for people, line by line.
func parseText(answer []byte) (*collector.RAS, error) {
	p := textParser{out: &collector.RAS{}, at: map[uint64]int{}, dead: map[int32]bool{}}
	lines := bufio.NewScanner(bytes.NewReader(answer))
	lines.Buffer(nil, 64<<10)
	for lines.Scan() {
		p.line(lines.Text())
	}
	p.flush()
	if !p.known {
		return nil, fmt.Errorf("%w: it begins with %.60q", ErrAnswer, answer)
	}
	for i := range p.out.Comms {
		for j := range p.out.Comms[i].Missing {
			m := &p.out.Comms[i].Missing[j]
			m.Dead = m.Dead || m.PID > 0 && p.dead[m.PID]
		}
	}
	return p.out, nil
}

// textParser is where in the text's sections a line stands.
type textParser struct {
	out    *collector.RAS
	known  bool           // this is RAS that answers
	at     map[uint64]int // index into out.Comms
	dead   map[int32]bool
	inDead bool
	c      *collector.RASComm    // whose section this is
	about  string                // what the section tells
	kind   string                // of the counts that follow
	count  uint64                // of the ranks that follow
	groups []collector.RASBehind // of the current kind, without their most
	most   uint64
}

// flush ends the counts of one kind: who has launched less than most is behind.
func (p *textParser) flush() {
	if p.c != nil {
		for _, b := range p.groups {
			if b.Most = p.most; b.Launched < p.most {
				p.c.FallBehind(b)
			}
		}
	}
	p.groups, p.most = p.groups[:0], 0
}

func (p *textParser) line(line string) {
	if m := version.FindStringSubmatch(line); m != nil && p.out.Version == "" {
		p.out.Version, p.known = printable(m[1]), true
		return
	}
	if section.MatchString(line) {
		p.flush()
		p.c, p.about, p.inDead, p.known = nil, "", strings.HasPrefix(line, "DEAD"), true
		return
	}
	if m := heading.FindStringSubmatch(line); m != nil {
		p.heading(m[1], m[2])
		return
	}
	if p.inDead {
		if m := ended.FindStringSubmatch(line); m != nil && len(p.dead) < 1<<12 {
			p.dead[number(m[1])] = true
		}
		return
	}
	if p.c == nil {
		return
	}
	switch p.about {
	case "INCOMPLETE":
		p.incomplete(line)
	case "MISMATCH":
		if m := differs.FindStringSubmatch(line); m != nil {
			p.flush()
			p.kind, p.count = m[1], 0
			p.about = "counts"
		}
	case "counts":
		p.counts(line)
	}
}

// heading begins a communicator's section. Its id has 16 hexadecimal digits at most.
func (p *textParser) heading(hex, about string) {
	p.flush()
	p.inDead, p.about, p.known = false, about, true
	id, _ := strconv.ParseUint(hex, 16, 64)
	i, ok := p.at[id]
	if !ok {
		if len(p.out.Comms) == collector.MaxRASComms {
			p.c = nil
			return
		}
		i = len(p.out.Comms)
		p.at[id] = i
		p.out.Comms = append(p.out.Comms, collector.RASComm{ID: id})
	}
	p.c = &p.out.Comms[i]
}

// incomplete takes the ranks of a line that are missing: in a list, or one with its process.
func (p *textParser) incomplete(line string) {
	if m := inLine.FindStringSubmatch(line); m != nil {
		for _, f := range strings.FieldsFunc(m[1], func(r rune) bool { return r == ',' || r == ' ' }) {
			first, last, ok := strings.Cut(f, "-")
			a, b := number(first), number(first)
			if ok {
				b = number(last)
			}
			for r := a; r >= 0 && r <= b && r-a <= collector.MaxRASRanks; r++ {
				p.c.Miss(collector.RASRank{Rank: r})
			}
		}
	} else if m := oneRank.FindStringSubmatch(line); m != nil {
		r := collector.RASRank{Rank: number(m[1])}
		if pid := process.FindStringSubmatch(line); pid != nil {
			r.PID = number(pid[1])
		}
		p.c.Miss(r)
	}
}

// counts takes how many operations of a kind ranks have launched.
func (p *textParser) counts(line string) {
	if ofStatus.MatchString(line) {
		p.flush()
		p.about = "MISMATCH"
		return
	}
	if m := differs.FindStringSubmatch(line); m != nil {
		p.flush()
		p.kind, p.count = m[1], 0
		return
	}
	if m := launched.FindStringSubmatch(line); m != nil {
		p.count, _ = strconv.ParseUint(m[3], 10, 64) // "": none
		p.most = max(p.most, p.count)
		if m[2] == "" {
			return // a group, whose ranks follow if they are few
		}
	}
	if m := oneRank.FindStringSubmatch(line); m != nil && len(p.groups) <= 4*collector.MaxRASRanks {
		p.groups = append(p.groups, collector.RASBehind{Rank: number(m[1]), Coll: printable(p.kind), Launched: p.count})
	}
}

func number(s string) int32 {
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return -1
	}
	return rank(n)
}

// printable keeps what is no secret language: words of an answer go into verdicts.
func printable(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return -1
		}
		return r
	}, s)
	return s[:min(len(s), 32)]
}
