package preflightcmd

import (
	"fmt"
	"io"
	"math"
	"time"
)

// phase tells on a terminal how far rank 0 is; nil tells nobody.
type phase struct {
	out   io.Writer
	begun time.Time
}

func (p *phase) show(what string, done, total int) {
	if p == nil {
		return
	}
	if done == 0 {
		p.begun = time.Now()
	}
	left := ""
	if done > 0 && done < total {
		eta := time.Since(p.begun).Seconds() / float64(done) * float64(total-done)
		left = fmt.Sprintf(", %.0f s left", math.Ceil(eta))
	}
	fmt.Fprintf(p.out, "\r\x1b[Kpreflight: %s %d/%d%s", what, done, total, left)
}

// wipe clears the line.
func (p *phase) wipe() {
	if p != nil {
		fmt.Fprint(p.out, "\r\x1b[K")
	}
}
