package browser

import (
	"encoding/json"
	"fmt"
	"sync"
	"time"
)

// Page is one tab.
type Page struct {
	b       *Browser
	session string

	mu       sync.Mutex
	loaded   chan struct{}
	problems []string
	user     string // SignIn's
	password string
}

// View is how a page is looked at.
type View struct {
	Width, Height int
	Dark          bool
	Mobile        bool
}

// Page opens a tab.
func (b *Browser) Page(v View) (*Page, error) {
	var target struct {
		TargetID string `json:"targetId"`
	}
	if err := b.call("", "Target.createTarget", map[string]any{"url": "about:blank"}, &target); err != nil {
		return nil, err
	}
	var attached struct {
		SessionID string `json:"sessionId"`
	}
	if err := b.call("", "Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &attached); err != nil {
		return nil, err
	}
	p := &Page{b: b, session: attached.SessionID}
	b.mu.Lock()
	b.pages[p.session] = p
	b.mu.Unlock()
	for _, domain := range []string{"Page", "Runtime", "Log", "Network", "DOM", "Accessibility"} {
		if err := p.do(domain+".enable", nil); err != nil {
			return nil, err
		}
	}
	if err := p.do("Performance.enable", map[string]any{"timeDomain": "threadTicks"}); err != nil {
		return nil, err
	}
	return p, p.Look(v)
}

// Look changes how the page is looked at.
func (p *Page) Look(v View) error {
	if err := p.do("Emulation.setDeviceMetricsOverride", map[string]any{"width": v.Width, "height": v.Height, "deviceScaleFactor": 1, "mobile": v.Mobile}); err != nil {
		return err
	}
	scheme := "light"
	if v.Dark {
		scheme = "dark"
	}
	return p.do("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": scheme}}})
}

// Close closes the tab.
func (p *Page) Close() { _ = p.do("Page.close", nil) }

func (p *Page) do(method string, params any) error {
	return p.b.call(p.session, method, params, nil)
}

// Open goes to an address and waits until it is loaded. It returns how long that took.
func (p *Page) Open(url string) (time.Duration, error) {
	loaded := make(chan struct{})
	p.mu.Lock()
	p.loaded = loaded
	p.mu.Unlock()
	began := time.Now()
	var to struct {
		ErrorText string `json:"errorText"`
	}
	if err := p.b.call(p.session, "Page.navigate", map[string]any{"url": url}, &to); err != nil {
		return 0, err
	}
	if to.ErrorText != "" {
		return 0, fmt.Errorf("browser: open %s: %s", url, to.ErrorText)
	}
	select {
	case <-loaded:
	case <-p.b.done:
		return 0, fmt.Errorf("browser: open %s: it has ended", url)
	case <-time.After(Within):
		return 0, fmt.Errorf("browser: open %s: not loaded within %v", url, Within)
	}
	return time.Since(began), nil
}

// Eval evaluates an expression, a promise's value when it is one, into v (nil: for its effect).
func (p *Page) Eval(expression string, v any) error {
	var r struct {
		Result struct {
			Value json.RawMessage `json:"value"`
		} `json:"result"`
		Exception *struct {
			Text      string `json:"text"`
			Exception struct {
				Description string `json:"description"`
			} `json:"exception"`
		} `json:"exceptionDetails"`
	}
	if err := p.b.call(p.session, "Runtime.evaluate", map[string]any{"expression": expression, "awaitPromise": true, "returnByValue": true}, &r); err != nil {
		return err
	}
	if r.Exception != nil {
		return fmt.Errorf("browser: evaluate: %s %s", r.Exception.Text, r.Exception.Exception.Description)
	}
	if v == nil || len(r.Result.Value) == 0 {
		return nil
	}
	return json.Unmarshal(r.Result.Value, v)
}

// SignIn has the page do what a person does who knows the server: go on past a certificate that no public
// authority has signed, and fill in the dialog that asks for user and password.
func (p *Page) SignIn(user, password string) error {
	p.mu.Lock()
	p.user, p.password = user, password
	p.mu.Unlock()
	if err := p.do("Security.setIgnoreCertificateErrors", map[string]any{"ignore": true}); err != nil {
		return err
	}
	return p.do("Fetch.enable", map[string]any{"handleAuthRequests": true})
}

// Status is the status of the answer that the page was made from.
func (p *Page) Status() (status int, err error) {
	return status, p.Eval("performance.getEntriesByType('navigation')[0].responseStatus", &status)
}

// Press presses a key that has no character: Tab, Enter, ArrowRight.
func (p *Page) Press(key string) error {
	codes := map[string]int{"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowDown": 40, "Space": 32}
	k := map[string]any{"type": "keyDown", "key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
	switch key {
	case "Enter":
		k["text"] = "\r"
	case "Space":
		k["key"], k["text"] = " ", " "
	}
	if err := p.do("Input.dispatchKeyEvent", k); err != nil {
		return err
	}
	delete(k, "text")
	k["type"] = "keyUp"
	return p.do("Input.dispatchKeyEvent", k)
}

// Node is a node of the accessibility tree: what a screen reader says.
type Node struct {
	Role, Name string
	Focusable  bool
	Backend    int // the element's id, for DOM calls
}

// Tree returns the accessibility tree's nodes that are not ignored, in document order.
func (p *Page) Tree() ([]Node, error) {
	type value struct {
		Value any `json:"value"`
	}
	var r struct {
		Nodes []struct {
			Ignored    bool  `json:"ignored"`
			Role       value `json:"role"`
			Name       value `json:"name"`
			Backend    int   `json:"backendDOMNodeId"`
			Properties []struct {
				Name  string `json:"name"`
				Value value  `json:"value"`
			} `json:"properties"`
		} `json:"nodes"`
	}
	if err := p.b.call(p.session, "Accessibility.getFullAXTree", nil, &r); err != nil {
		return nil, err
	}
	var out []Node
	for _, n := range r.Nodes {
		if n.Ignored {
			continue
		}
		x := Node{Backend: n.Backend}
		x.Role, _ = n.Role.Value.(string)
		x.Name, _ = n.Name.Value.(string)
		for _, prop := range n.Properties {
			if prop.Name == "focusable" {
				x.Focusable, _ = prop.Value.Value.(bool)
			}
		}
		out = append(out, x)
	}
	return out, nil
}

// Screenshot returns a PNG of the page as far as the height given.
func (p *Page) Screenshot(width, height int) ([]byte, error) {
	var r struct {
		Data []byte `json:"data"`
	}
	err := p.b.call(p.session, "Page.captureScreenshot", map[string]any{
		"format": "png", "optimizeForSpeed": false, "captureBeyondViewport": true,
		"clip": map[string]any{"x": 0, "y": 0, "width": width, "height": height, "scale": 1},
	}, &r)
	return r.Data, err
}

// CPU returns the CPU time that the page's main thread has taken so far: scripts, style,
// layout. It says what a page costs, whatever else the machine does.
func (p *Page) CPU() (time.Duration, error) {
	var r struct {
		Metrics []struct {
			Name  string  `json:"name"`
			Value float64 `json:"value"`
		} `json:"metrics"`
	}
	if err := p.b.call(p.session, "Performance.getMetrics", nil, &r); err != nil {
		return 0, err
	}
	for _, m := range r.Metrics {
		if m.Name == "TaskDuration" {
			return time.Duration(m.Value * 1e9), nil
		}
	}
	return 0, fmt.Errorf("browser: it does not tell TaskDuration")
}

// Problems returns what the browser has complained of so far: errors on the console,
// exceptions, what a policy forbade, what could not be loaded.
func (p *Page) Problems() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string(nil), p.problems...)
}

func (p *Page) event(method string, params json.RawMessage) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch method {
	case "Page.loadEventFired":
		if p.loaded != nil {
			close(p.loaded)
			p.loaded = nil
		}
	case "Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown":
		var e struct {
			Type  string `json:"type"`
			Entry struct {
				Level, Text, URL string
			} `json:"entry"`
		}
		_ = json.Unmarshal(params, &e) // the text below says what came
		if e.Entry.Level == "info" || e.Entry.Level == "verbose" || method == "Runtime.consoleAPICalled" && e.Type != "error" && e.Type != "warning" {
			return
		}
		if len(p.problems) < 100 {
			p.problems = append(p.problems, fmt.Sprintf("%s: %.600s", method, params))
		}
	case "Fetch.requestPaused", "Fetch.authRequired":
		var e struct {
			ID string `json:"requestId"`
		}
		if json.Unmarshal(params, &e) != nil {
			return
		}
		answer := map[string]any{"requestId": e.ID}
		to := "Fetch.continueRequest"
		if method == "Fetch.authRequired" {
			to = "Fetch.continueWithAuth"
			answer["authChallengeResponse"] = map[string]string{"response": "ProvideCredentials", "username": p.user, "password": p.password}
		}
		go func() { _ = p.do(to, answer) }() // the answer comes by who calls this; a page that is gone waits for none
	case "Network.loadingFailed":
		if len(p.problems) < 100 {
			p.problems = append(p.problems, fmt.Sprintf("%s: %.300s", method, params))
		}
	}
}
