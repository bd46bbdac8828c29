// Command peers compares `lockstep perf` with OpenMPI on this machine and
// prints one line a collective, number of ranks, transport and size, then a
// summary. Both run in turn, round after round; a time is the median over rounds
// (with -least the shortest, for a machine that others load), and a ratio above
// 1 means that Lockstep is slower than OpenMPI.
//
//	go run ./cmd/peers -lockstep ../bin/lockstep -coll allreduce,sendrecv -transport shm
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/lockstep-ccl/lockstep/bench/peers"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "peers:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	var (
		lockstep   = flag.String("lockstep", "bin/lockstep", "the lockstep binary")
		colls      = flag.String("coll", "allreduce,reduce_scatter,allgather,broadcast,alltoall,sendrecv", "collectives")
		ranks      = flag.String("ranks", "2,8", "numbers of ranks")
		transports = flag.String("transport", "shm,tcp", "transports")
		smallest   = flag.Int("min", 8, "smallest size in bytes")
		largest    = flag.Int("max", 64<<20, "largest size in bytes")
		factor     = flag.Int("factor", 4, "from one size to the next")
		rounds     = flag.Int("rounds", 3, "how often the libraries take turns")
		nocma      = flag.Bool("nocma", false, "over shared memory, also measure OpenMPI without single copy (CMA), which some machines run faster; the ratio is against its better time")
		least      = flag.Bool("least", false, "take the shortest time of all rounds instead of the median")
		timeout    = flag.Duration("timeout", 5*time.Minute, "bound on one run of one library")
	)
	flag.Parse()
	pick := peers.Median
	if *least {
		pick = peers.Least
	}

	dir, err := os.MkdirTemp("", "peers-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	mpibench, err := peers.BuildMPI(ctx, dir)
	if err != nil {
		return err
	}
	ours, err := peers.NewLockstep(*lockstep)
	if err != nil {
		return err
	}

	var all []peers.Line
	for n := range strings.SplitSeq(*ranks, ",") {
		n, err := strconv.Atoi(n)
		if err != nil || n < 2 {
			return fmt.Errorf("-ranks %q: want numbers of at least 2", *ranks)
		}
		for transport := range strings.SplitSeq(*transports, ",") {
			libs := []peers.Peer{peers.NewMPI("OpenMPI", mpibench)}
			if *nocma && transport == "shm" {
				libs = append(libs, peers.NewMPI("no CMA", mpibench, "btl_vader_single_copy_mechanism=none"))
			}
			libs = append(libs, ours)
			for i := range libs {
				libs[i] = bounded{libs[i], *timeout}
			}
			peers.Header(os.Stdout, libs)
			for coll := range strings.SplitSeq(*colls, ",") {
				c := peers.Case{Coll: coll, Ranks: n, Transport: transport, Min: *smallest, Max: *largest, Factor: *factor}
				lines, err := peers.Compare(ctx, libs, c, *rounds, pick)
				if err != nil {
					return err
				}
				peers.Print(os.Stdout, lines)
				all = append(all, lines...)
			}
			fmt.Println()
		}
	}
	peers.Summary(os.Stdout, all)
	return nil
}

// bounded gives up on a peer that does not come back.
type bounded struct {
	peers.Peer
	timeout time.Duration
}

func (b bounded) Run(ctx context.Context, c peers.Case) ([]peers.Sample, error) {
	ctx, cancel := context.WithTimeout(ctx, b.timeout)
	defer cancel()
	return b.Peer.Run(ctx, c)
}
