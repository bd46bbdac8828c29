package reduce

import "unsafe"

// WithoutVector runs f on the portable code alone.
func WithoutVector(f func()) {
	v, s, h, b := vector, vectorScale, float16, bfloat16
	defer func() { vector, vectorScale, float16, bfloat16 = v, s, h, b }()
	vector, vectorScale = [numTypes][numOps]kernel{}, [numTypes]func(unsafe.Pointer, int, int){}
	for _, f := range []*halfFormat{&float16, &bfloat16} {
		*f = halfFormat{widen: f.widen, narrow: f.narrow}
	}
	f()
}
