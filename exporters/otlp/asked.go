package otlp

import "github.com/lockstep-ccl/lockstep/record"

// maxAskedFor bounds the traces of which is remembered that they were asked for, or that
// their root went out.
const maxAskedFor = 1024

type askedKey struct {
	job  string
	comm uint64
	kind record.CollKind
	seq  uint64
}

// asked remembers the last traces that were asked for or have their root: what ends later
// of these is exported, and no child of the root, which does not cover it. The zero value is ready.
type asked struct {
	known map[askedKey]bool // true: the root is out
	order []askedKey
	seqs  [256]uint16 // how many of them have a sequence that ends so: most collectives need no look at known
}

func (a *asked) has(k askedKey) bool {
	if a.seqs[k.seq%256] == 0 {
		return false
	}
	_, ok := a.known[k]
	return ok
}

func (a *asked) add(k askedKey) {
	if _, ok := a.known[k]; ok {
		return
	}
	if a.known == nil {
		a.known = map[askedKey]bool{}
	}
	if len(a.order) == maxAskedFor {
		old := a.order[0]
		a.order = append(a.order[:0], a.order[1:]...)
		delete(a.known, old)
		a.seqs[old.seq%256]--
	}
	a.known[k] = false
	a.order = append(a.order, k)
	a.seqs[k.seq%256]++
}

// rooted notes that the root goes out, and reports whether one had before.
func (a *asked) rooted(k askedKey) bool {
	a.add(k)
	was := a.known[k]
	a.known[k] = true
	return was
}
