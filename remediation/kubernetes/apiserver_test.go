package kubernetes

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
)

// apiserver is as much of an API server as the package speaks to: objects with
// resource versions that merge patches and updates are checked against, status apart from
// the rest, selectors, graceful and forced deletion. It notes which verbs are
// used, and can end connections before or after it has done as asked.
type apiserver struct {
	t  *testing.T
	ts *httptest.Server

	mu      sync.Mutex
	version int
	objects map[string]map[string]any // by path
	writes  int
	// break_, when set, is asked for each write, counted from 0: done says whether it is
	// carried out, answered whether anybody hears of it.
	break_ func(write int) (done, answered bool)
	// changed is called after each write, unlocked: the cluster's controllers.
	changed func()
	// read, when set, is called before each get, unlocked.
	read  func(path string)
	kinds map[string]bool // resources that are not there, as of CRDs
}

func newAPIServer(t *testing.T) *apiserver {
	s := &apiserver{t: t, objects: map[string]map[string]any{}, kinds: map[string]bool{}}
	s.ts = httptest.NewServer(s)
	t.Cleanup(s.ts.Close)
	return s
}

func (s *apiserver) client() dynamic.Interface {
	c, err := dynamic.NewForConfig(&rest.Config{Host: s.ts.URL, QPS: -1})
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

// obj is a part of an object.
type obj = map[string]any

func at(o map[string]any, path ...string) any {
	var v any = o
	for _, f := range path {
		m, _ := v.(map[string]any)
		v = m[f]
	}
	return v
}

func text(o map[string]any, path ...string) string { s, _ := at(o, path...).(string); return s }

// put stores an object as a test or a controller says, whatever was there.
func (s *apiserver) put(path string, o obj) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.store(path, o)
}

func (s *apiserver) store(path string, o obj) {
	b, err := json.Marshal(o)
	if err == nil {
		o = obj{}
		err = json.Unmarshal(b, &o)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	meta, _ := o["metadata"].(map[string]any)
	if meta == nil {
		meta = obj{}
		o["metadata"] = meta
	}
	s.version++
	meta["resourceVersion"] = fmt.Sprint(s.version)
	meta["name"] = path[strings.LastIndex(path, "/")+1:]
	if i := strings.Index(path, "/namespaces/"); i >= 0 {
		meta["namespace"] = strings.Split(path[i:], "/")[2]
	}
	if meta["uid"] == nil {
		meta["uid"] = fmt.Sprint("uid-", s.version)
	}
	s.objects[path] = o
}

// get returns a copy, nil when there is none.
func (s *apiserver) get(path string) obj {
	s.mu.Lock()
	defer s.mu.Unlock()
	o, ok := s.objects[path]
	if !ok {
		return nil
	}
	b, _ := json.Marshal(o)
	c := obj{}
	json.Unmarshal(b, &c)
	return c
}

// under lists the paths of a collection.
func (s *apiserver) under(prefix string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []string
	for p := range s.objects {
		if strings.HasPrefix(p, prefix+"/") {
			list = append(list, p)
		}
	}
	slices.Sort(list)
	return list
}

func (s *apiserver) remove(path string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.objects, path)
}

func fail(w http.ResponseWriter, code int, reason, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(obj{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": message, "code": code})
}

func (s *apiserver) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := strings.TrimSuffix(r.URL.Path, "/")
	verb, group, resource, namespace := requestOf(r)
	noteAsked(verb, group, resource, namespace)
	resource, sub, _ := strings.Cut(resource, "/")
	if sub != "" {
		path = strings.TrimSuffix(path, "/"+sub)
	}
	s.mu.Lock()
	done, answered := true, true
	if verb != "get" && verb != "list" {
		if s.break_ != nil && resource != "leases" {
			done, answered = s.break_(s.writes)
		}
		s.writes++
	}
	missing := s.kinds[resource]
	s.mu.Unlock()
	if missing {
		fail(w, 404, "NotFound", "the server could not find the requested resource")
		return
	}
	if verb == "get" && s.read != nil {
		s.read(path)
	}
	rec := httptest.NewRecorder()
	if done {
		s.serve(rec, r, verb, path, sub)
		if s.changed != nil && verb != "get" && verb != "list" {
			s.changed()
		}
	}
	if !done || !answered {
		panic(http.ErrAbortHandler)
	}
	maps.Copy(w.Header(), rec.Header())
	w.WriteHeader(rec.Code)
	w.Write(rec.Body.Bytes())
}

func (s *apiserver) serve(w http.ResponseWriter, r *http.Request, verb, path, sub string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var body obj
	if verb != "get" && verb != "list" {
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil && verb != "delete" {
			fail(w, 400, "BadRequest", err.Error())
			return
		}
	}
	reply := func(o any) {
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(o)
	}
	if verb == "create" {
		path += "/" + text(body, "metadata", "name")
	}
	old, ok := s.objects[path]
	switch {
	case verb == "list":
		sel, err := labels.Parse(r.URL.Query().Get("labelSelector"))
		if err != nil {
			fail(w, 400, "BadRequest", err.Error())
			return
		}
		items := []any{}
		for _, p := range slices.Sorted(maps.Keys(s.objects)) {
			if rest, in := strings.CutPrefix(p, path+"/"); !in || strings.Contains(rest, "/") {
				continue
			}
			set := labels.Set{}
			if m, ok := at(s.objects[p], "metadata", "labels").(map[string]any); ok {
				for k, v := range m {
					set[k], _ = v.(string)
				}
			}
			if sel.Matches(set) {
				items = append(items, s.objects[p])
			}
		}
		reply(obj{"kind": "List", "apiVersion": "v1", "metadata": obj{}, "items": items})
		return
	case verb == "create" && ok:
		fail(w, 409, "AlreadyExists", path+" exists")
		return
	case verb == "create":
		s.store(path, body)
	case !ok:
		fail(w, 404, "NotFound", path+" not found")
		return
	case verb == "delete":
		if uid := text(body, "preconditions", "uid"); uid != "" && uid != text(old, "metadata", "uid") {
			fail(w, 409, "Conflict", "uid")
			return
		}
		delete(s.objects, path)
		reply(obj{"kind": "Status", "apiVersion": "v1", "status": "Success"})
		return
	case verb == "patch" || verb == "update":
		want := text(body, "metadata", "resourceVersion")
		if want != "" && want != text(old, "metadata", "resourceVersion") || text(body, "metadata", "uid") != "" && text(body, "metadata", "uid") != text(old, "metadata", "uid") {
			fail(w, 409, "Conflict", "the object has been modified")
			return
		}
		if verb == "update" {
			s.store(path, body)
			break
		}
		b, _ := json.Marshal(old)
		o := obj{}
		json.Unmarshal(b, &o)
		delete(body["metadata"].(map[string]any), "resourceVersion")
		if r.Header.Get("Content-Type") == "application/apply-patch+yaml" {
			applyConditions(o, body)
		} else {
			for k, v := range body { // status is written by its own path only
				if (k == "status") == (sub == "status") || k == "metadata" && sub == "" {
					o[k] = merged(o[k], v)
				}
			}
		}
		s.store(path, o)
	}
	reply(s.objects[path])
}

// merged is RFC 7396.
func merged(old, patch any) any {
	p, ok := patch.(map[string]any)
	if !ok {
		return patch
	}
	m, ok := old.(map[string]any)
	if !ok {
		m = obj{}
	}
	for k, v := range p {
		if v == nil {
			delete(m, k)
		} else {
			m[k] = merged(m[k], v)
		}
	}
	return m
}

// applyConditions is server-side apply of the one list that the package applies.
func applyConditions(o, body obj) {
	status, _ := o["status"].(map[string]any)
	if status == nil {
		status = obj{}
		o["status"] = status
	}
	list, _ := status["conditions"].([]any)
	for _, c := range at(body, "status", "conditions").([]any) {
		list = slices.DeleteFunc(list, func(x any) bool { return text(x.(map[string]any), "type") == text(c.(map[string]any), "type") })
		list = append(list, c)
	}
	status["conditions"] = list
}
