package main

import (
	"bytes"
	"os"
	"testing"
)

func TestHeaderIsUpToDate(t *testing.T) {
	want, err := generate("../..")
	if err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile("../../c/lockstep_record.h")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Fatal("record/c/lockstep_record.h is stale: run go generate ./record")
	}
}
