package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestTune: each size goes to the quickest, a step to as many multiprocessors as it was
// measured with, noise makes no step, and copy engines are preferred.
func TestTune(t *testing.T) {
	line := func(coll, algo, size, sms, us string) string {
		return `{"collective":"` + coll + `","size":` + size + `,"type":"float32","ranks":4,"device":"cuda","launch":"graph","registered":true,"sms":` + sms +
			`,"algo":"` + algo + `","out_of_place":{"us":` + us + `}}` + "\n"
	}
	measured := filepath.Join(t.TempDir(), "forced.jsonl")
	base := filepath.Join(t.TempDir(), "base.json")
	text := line("allreduce", "ll", "1024", "1", "3") + line("allreduce", "bulk", "1024", "1", "9") +
		line("allreduce", "ll", "4096", "2", "4.05") + line("allreduce", "bulk", "4096", "1", "4") +
		line("allreduce", "ll", "65536", "32", "8") + line("allreduce", "bulk", "65536", "16", "5") +
		line("allgather", "sym", "1024", "1", "5") + line("allgather", "sym", "4096", "16", "9") + line("allgather", "sym", "4096", "32", "8") +
		line("allgather", "sym", "65536", "32", "100") + line("allgather", "ce", "65536", "0", "104") +
		line("sendrecv", "ce", "65536", "0", "104") +
		strings.ReplaceAll(line("allreduce", "bulk", "65536", "16", "9")+line("allreduce", "ring", "65536", "16", "6"), `"registered":true`, `"registered":false`)
	for name, text := range map[string]string{
		measured: text,
		base:     `{"version": 1, "rows": [{"collective": "AllReduce", "ranks": [3, 4], "steps": [{"algo": "sym", "sms": 1}]}, {"collective": "Reduce", "ranks": [1, 9], "steps": [{"algo": "sym", "sms": 1}]}]}`,
	} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const want = `{"version": 1, "rows": [
  {"collective": "AllReduce", "ranks": [3, 4], "steps": [
    {"up_to": 4096, "algo": "ll", "sms": 32},
    {"algo": "bulk", "sms": 16}]},
  {"collective": "Reduce", "ranks": [1, 9], "steps": [
    {"algo": "sym", "sms": 1}]},
  {"collective": "AllGather", "ranks": [3, 4], "steps": [
    {"up_to": 256, "algo": "sym", "sms": 16},
    {"up_to": 1024, "algo": "sym", "sms": 32},
    {"algo": "ce", "sms": 0}]},
  {"collective": "AllReduce", "ranks": [3, 4], "buffers": "plain", "steps": [
    {"algo": "ring", "sms": 16}]}
]}
`
	var got bytes.Buffer
	if err := run(&got, base, "3-4", []string{measured}); err != nil {
		t.Fatal(err)
	}
	if got.String() != want {
		t.Errorf("got\n%s\nwant\n%s", got.String(), want)
	}
}
