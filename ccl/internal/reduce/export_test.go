package reduce

import "unsafe"

// Paths runs a function on each code path that this machine has.
var Paths = map[string]func(f func()){
	"default":  func(f func()) { f() },
	"portable": func(f func()) { with(func() {}, f) },
}

// with runs f with only those vector kernels that use puts into the tables.
func with(use, f func()) {
	v, s, h, b := vector, vectorScale, float16, bfloat16
	defer func() { vector, vectorScale, float16, bfloat16 = v, s, h, b }()
	vector, vectorScale = [numTypes][numOps]kernel{}, [numTypes]func(unsafe.Pointer, int, int){}
	for _, f := range []*halfFormat{&float16, &bfloat16} {
		*f = halfFormat{widen: f.widen, narrow: f.narrow}
	}
	use()
	f()
}
