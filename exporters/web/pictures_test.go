package web_test

import (
	"bytes"
	"flag"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/lockstep-ccl/lockstep/internal/browser"
)

var images = flag.Bool("images", false, "write the screenshots to docs/images")

const maxImage = 150 << 10

// picture takes a screenshot, and keeps it in docs/images with -images.
func picture(t *testing.T, p *browser.Page, name string, v browser.View) {
	t.Helper()
	if err := p.Eval("document.querySelectorAll('details.closed').forEach(d => d.open = true)", nil); err != nil {
		t.Fatal(err)
	}
	var height float64
	if err := p.Eval("document.documentElement.scrollHeight", &height); err != nil {
		t.Fatal(err)
	}
	shot, err := p.Screenshot(v.Width, min(int(height), 1400))
	if err != nil {
		t.Fatal(err)
	}
	shot = small(t, shot)
	if len(shot) > maxImage {
		t.Errorf("%s: %d bytes, at most %d", name, len(shot), maxImage)
	}
	if *images && !strings.HasSuffix(name, "narrow-dark") {
		if err := os.MkdirAll("../../docs/images", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join("../../docs/images", name+".png"), shot, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// small reduces a screenshot to the 256 colours that it has most of: text on plain colours loses nothing.
func small(t *testing.T, shot []byte) []byte {
	img, err := png.Decode(bytes.NewReader(shot))
	if err != nil {
		t.Fatal(err)
	}
	count := map[color.RGBA]int{}
	r := img.Bounds()
	for y := r.Min.Y; y < r.Max.Y; y++ {
		for x := r.Min.X; x < r.Max.X; x++ {
			count[color.RGBAModel.Convert(img.At(x, y)).(color.RGBA)]++
		}
	}
	var colors []color.RGBA
	for c := range count {
		colors = append(colors, c)
	}
	slices.SortFunc(colors, func(a, b color.RGBA) int {
		if d := count[b] - count[a]; d != 0 {
			return d
		}
		return int(a.R)<<16 + int(a.G)<<8 + int(a.B) - int(b.R)<<16 - int(b.G)<<8 - int(b.B)
	})
	palette := color.Palette{}
	for _, c := range colors[:min(len(colors), 256)] {
		palette = append(palette, c)
	}
	out := image.NewPaletted(r, palette)
	draw.Draw(out, r, img, r.Min, draw.Src)
	var b bytes.Buffer
	if err := (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&b, out); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}
