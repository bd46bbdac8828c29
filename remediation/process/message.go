package process

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"time"
)

// protocol is the version of what a host's supervisor and the coordinator say to each other.
const protocol = 1

// maxMessage bounds one message: a report of maxLocal ranks has room in it.
const (
	maxMessage = 1 << 20
	maxLocal   = 1024
)

// Report is all that a host's supervisor says of itself, the whole of it each time.
type Report struct {
	Protocol int    `json:"protocol"`
	Seq      uint64 `json:"seq"` // of this connection
	Job      string `json:"job"`
	Node     string `json:"node"`
	// Holder is a random number of its state directory: who has the directory's lock has ended
	// what a former holder had started. Boot is the kernel's boot id.
	Holder string `json:"holder"`
	Boot   string `json:"boot"`
	Local  int    `json:"local"` // ranks a host, by its command line

	Run  string `json:"run"` // that it belongs to, "" none yet
	Rev  uint64 `json:"rev"` // of the last order that it has carried out
	Last uint64 `json:"last"`
	// Holds is the generation of the attempt whose processes it may still have, 0 none; Last is that of the
	// last one that it has begun to start. Ranks are those of Holds.
	Holds uint64       `json:"holds"`
	Ranks []RankStatus `json:"ranks,omitempty"`
	// Failed says why it could not start, or not stop, an attempt.
	Failed  string `json:"failed,omitempty"`
	Leaving bool   `json:"leaving,omitempty"` // it was told to end
	// Meet is the environment by which the next attempt's ranks meet, if rank 0 is here.
	Meet map[string]string `json:"meet,omitempty"`
}

// Kinds of orders.
const (
	orderWait   = "wait"   // have no process of any attempt
	orderRun    = "run"    // have the processes of this one
	orderDone   = "done"   // the job has ended well
	orderFailed = "failed" // it has not
	orderRefuse = "refuse" // this supervisor is none of the job's
)

// Order is all that the coordinator wants of a host, the whole of it each time.
type Order struct {
	Protocol int    `json:"protocol"`
	Seq      uint64 `json:"seq"` // of the report that it answers
	Run      string `json:"run"`
	Rev      uint64 `json:"rev"` // grows with each change of mind; on disk before it is said
	Kind     string `json:"kind"`
	Why      string `json:"why,omitempty"`
	// Lease is for how long the processes may go on without an answer, counted from when the report was sent.
	Lease time.Duration `json:"lease"`
	Grace time.Duration `json:"grace"`

	Generation uint64            `json:"generation,omitempty"`
	Attempt    int               `json:"attempt,omitempty"`
	Token      string            `json:"token,omitempty"`
	Secret     string            `json:"secret,omitempty"`
	Group      int               `json:"group,omitempty"` // of this host among the attempt's
	Groups     int               `json:"groups,omitempty"`
	Meet       map[string]string `json:"meet,omitempty"`
}

// meetValue is what a meeting place's variables may hold. They go into the environment of all
// hosts' ranks, so a host may say no other variable, and nothing but an address or an id.
var (
	meetNames = []string{"LOCKSTEP_COMM_ID", "MASTER_ADDR", "MASTER_PORT"}
	meetValue = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9.:_/@%\[\]-]{0,255}$|^\[[A-Fa-f0-9:.%a-z]{1,60}\]:[0-9]{1,5}$`)
	hostName  = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9._]{0,61}[A-Za-z0-9])?$`)
	hexID     = regexp.MustCompile(`^[a-f0-9-]{1,64}$`)
)

func checkMeet(m map[string]string) error {
	for k, v := range m {
		if !slices.Contains(meetNames, k) || !meetValue.MatchString(v) {
			return fmt.Errorf("meeting place: %.40q=%.80q: want an address or an id in one of %v", k, v, meetNames)
		}
	}
	return nil
}

// check returns an error unless a report can be a supervisor's.
func (r *Report) check() error {
	switch {
	case r.Protocol != protocol:
		return fmt.Errorf("it speaks version %d, this program version %d: run the same lockstep on all hosts", r.Protocol, protocol)
	case !hostName.MatchString(r.Node):
		return fmt.Errorf("node name %.80q: want at most 63 letters, digits, dots, underscores and -", r.Node)
	case !hexID.MatchString(r.Holder) || !hexID.MatchString(r.Boot) || r.Run != "" && !hexID.MatchString(r.Run):
		return errors.New("it does not say which state directory, boot or run is its own")
	case r.Local < 1 || r.Local > maxLocal || len(r.Ranks) > maxLocal:
		return fmt.Errorf("%d ranks a host; 1 to %d are possible", max(r.Local, len(r.Ranks)), maxLocal)
	case r.Holds > r.Last:
		return errors.New("it has processes of an attempt that it never began")
	}
	r.Failed = bound(r.Failed)
	for i := range r.Ranks {
		x := &r.Ranks[i]
		if x.Rank < 0 || x.State != "running" && x.State != "exited" {
			return fmt.Errorf("rank %d is in state %.20q", x.Rank, x.State)
		}
		x.Exit, x.Node, x.Unit = bound(x.Exit), r.Node, r.Node
	}
	return checkMeet(r.Meet)
}

// bound cuts text that another process wrote.
func bound(s string) string {
	const most = 512
	if len(s) > most {
		return s[:most]
	}
	return s
}

// check returns an error unless an order can be a coordinator's.
func (o *Order) check() error {
	switch {
	case o.Protocol != protocol:
		return fmt.Errorf("the coordinator speaks version %d, this program version %d: run the same lockstep on all hosts", o.Protocol, protocol)
	case o.Kind == orderRefuse:
		return nil
	case !hexID.MatchString(o.Run) || o.Lease <= 0 || o.Grace < 0:
		return errors.New("the coordinator's order says no run, or no lease")
	case !slices.Contains([]string{orderWait, orderRun, orderDone, orderFailed}, o.Kind):
		return fmt.Errorf("the coordinator's order is a %.20q", o.Kind)
	case o.Kind == orderRun && (o.Generation == 0 || o.Attempt < 0 || o.Token == "" || !hexID.MatchString(o.Secret) || o.Groups < 1 || o.Group < 0 || o.Group >= o.Groups):
		return errors.New("the coordinator's order to run is not complete")
	}
	return checkMeet(o.Meet)
}

func env(m map[string]string) (list []string) {
	for _, k := range slices.Sorted(maps.Keys(m)) {
		list = append(list, k+"="+m[k])
	}
	return list
}

// writeMessage writes one: its length in four bytes, then JSON.
func writeMessage(w io.Writer, v any) error {
	b, err := json.Marshal(v)
	if err == nil && len(b) > maxMessage {
		err = fmt.Errorf("message of %d bytes, at most %d are sent", len(b), maxMessage)
	}
	if err != nil {
		return err
	}
	_, err = w.Write(append(binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(b)), uint32(len(b))), b...))
	return err
}

func readMessage(r io.Reader, v any) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > maxMessage {
		return fmt.Errorf("%w: of %d bytes, at most %d are taken", errMessage, n, maxMessage)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(r, b); err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%w: %w", errMessage, err)
	}
	return nil
}

// errMessage: what came is no message of the protocol's.
var errMessage = errors.New("no message of a lockstep")
