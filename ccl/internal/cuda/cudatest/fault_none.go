//go:build !cgo

package cudatest

const cgo = false

func fault(string, int, int, int) {}

func separate(int, int) {}

func unlink(int, int) {}

func slowLink(int, int, int) {}

func deny(int) {}
