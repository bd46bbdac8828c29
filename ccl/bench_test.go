package ccl_test

import (
	"context"
	"os"
	"testing"

	"github.com/lockstep-ccl/lockstep/ccl"
	"github.com/lockstep-ccl/lockstep/record"
)

// BenchmarkCall is what a call and its Wait cost beside moving bytes: the
// communicator has one rank. Compare recorder=on with off.
func BenchmarkCall(b *testing.B) {
	for _, recorder := range []string{"off", "on"} {
		b.Run("recorder="+recorder, func(b *testing.B) {
			cfg := ccl.Config{ID: freeID(b), Size: 1, Secret: secret}
			if recorder == "on" {
				// Where it is in production, not on a disk that writes pages back.
				rec, err := record.Create(record.Options{Dir: "/dev/shm/lockstep"})
				if err != nil {
					b.Skip(err)
				}
				defer os.Remove(rec.Path())
				defer rec.Close()
				cfg.Recorder = rec
			}
			ctx := context.Background()
			c, err := ccl.Init(ctx, cfg)
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			s, x := c.NewStream(), make([]float32, 2)
			b.ReportAllocs()
			for b.Loop() {
				if err := c.AllReduce(s, ccl.Of(x), ccl.Of(x), ccl.Sum); err != nil {
					b.Fatal(err)
				}
				if err := s.Wait(ctx); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
