package fabric_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/pathplan/service"
)

// Processes of the tests are this program again, in a namespace, with a role.
const roleEnv = "FABRIC_TEST_ROLE"

type role struct {
	Kind    string // rank, prober, planner
	Planner string // address; "" for none
	Node    string
	Job     string

	Rank, Size int
	ID, Addr   string
	Bytes      int // of all AllReduces of one turn
	Depth      int // how many these are: a training step's, one after the other
	Seconds    float64
	Lanes      int
	Stalls     bool // a rank: tells how its flows stall, which costs time on few cores

	Fabric string // file
	Prints bool   // a planner: what it finds
	Light  bool   // and that it probes little: links of some Mbit/s feel it
}

func TestMain(m *testing.M) {
	if s := os.Getenv(roleEnv); s != "" {
		var r role
		err := json.Unmarshal([]byte(s), &r)
		if err == nil {
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
			defer stop()
			err = r.play(ctx)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, r.Kind, r.Node, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func (r *role) play(ctx context.Context) error {
	level := slog.LevelWarn
	if os.Getenv("FABRIC_TEST_DEBUG") != "" {
		level = slog.LevelDebug
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	slog.SetDefault(log)
	switch r.Kind {
	case "rank":
		return r.rank(ctx, log)
	case "prober":
		creds, err := service.Credentials(nil, true)
		if err != nil {
			return err
		}
		p, err := service.NewProber(service.ProberOptions{Planner: r.Planner, Credentials: creds, Node: r.Node, Log: log})
		if err != nil {
			return err
		}
		return p.Run(ctx)
	case "planner":
		f, err := service.ReadFabric(r.Fabric)
		if err != nil {
			return err
		}
		var decided func(service.Decision)
		if r.Prints {
			decided = func(d service.Decision) {
				if len(d.Moves) == 0 {
					fmt.Println(d.Link, d.State.Down, d.State.Loss)
				}
			}
		}
		probing := service.Probing{Every: time.Second, Count: number("COUNT", 10)}
		if r.Light {
			probing = service.Probing{Every: time.Second, Count: number("COUNT", 2), Ports: 128, Rate: number("PROBES", 400)}
		}
		s, err := service.New(service.Options{
			Decided: decided, Probing: probing,
			Fabric: f, Listen: r.Planner, Insecure: true, Log: log,
		})
		if err != nil {
			return err
		}
		return s.Run(ctx)
	}
	return fmt.Errorf("no role %q", r.Kind)
}

// rank runs AllReduces for some time; rank 0 prints when each turn of them ended, in seconds since the
// epoch, and each rank checks the sums.
func (r *role) rank(ctx context.Context, log *slog.Logger) error {
	id, err := ccl.ParseUniqueID(r.ID)
	if err != nil {
		return err
	}
	algo, err := ccl.ParseAlgo("ring")
	if err != nil {
		return err
	}
	cfg := ccl.Config{
		ID: id, Rank: r.Rank, Size: r.Size, Name: r.Job, Secret: []byte("a secret of at least sixteen bytes"), Node: r.Node,
		Algo: algo, Sockets: r.Lanes, Interface: netip.MustParseAddr(r.Addr).String(), Timeout: time.Minute, Log: log,
	}
	if r.Planner != "" {
		creds, err := service.Credentials(nil, true)
		if err != nil {
			return err
		}
		c, err := service.NewClient(service.ClientOptions{Planner: r.Planner, Credentials: creds, Node: r.Node, Job: r.Job, Log: log})
		if err != nil {
			return err
		}
		defer c.Close()
		cfg.Paths = c
	}
	if r.Stalls {
		if cfg.Recorder, err = r.recorder(); err != nil {
			return err
		}
		defer cfg.Recorder.Close()
	}
	comm, err := ccl.Init(ctx, cfg)
	if err != nil {
		return err
	}
	defer comm.Close()
	if r.Stalls {
		told, err := watchStalls(ctx, cfg.Recorder, r.Rank)
		if err != nil {
			return err
		}
		defer told()
	}
	s := comm.NewStream()
	in, out := make([]float32, r.Bytes/4/r.Depth), make([]float32, r.Bytes/4/r.Depth)
	const last = 1 << 20 // rank 0 adds it to the first element in the last turn, so that all ranks know
	for began, stop := time.Now(), false; !stop; {
		for i := range in {
			in[i] = float32(i%7 + r.Rank)
		}
		if r.Rank == 0 && time.Since(began).Seconds() > r.Seconds {
			in[0] += last
		}
		for range r.Depth {
			if err := comm.AllReduce(s, ccl.Of(in), ccl.Of(out), ccl.Sum); err != nil {
				return err
			}
		}
		if err := s.Wait(ctx); err != nil {
			return err
		}
		if r.Rank == 0 {
			fmt.Println(strconv.FormatFloat(float64(time.Now().UnixNano())/1e9, 'f', 4, 64))
		}
		if stop = out[0] >= last; stop {
			out[0] -= last
		}
		for i := range out {
			if want := float32(r.Size*(i%7) + r.Size*(r.Size-1)/2); out[i] != want {
				return fmt.Errorf("element %d is %v, want %v", i, out[i], want)
			}
		}
	}
	return nil
}
