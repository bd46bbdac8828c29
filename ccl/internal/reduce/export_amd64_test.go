package reduce

func init() {
	if vector[0][0] != nil {
		Paths["avx2"] = func(f func()) { with(useAVX2, f) }
	}
}
