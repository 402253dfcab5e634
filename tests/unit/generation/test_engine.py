from .conftest import *
def test_x(make_engine, step, settings):
    e=make_engine(step,settings)
    sinks=[]
    for i in range(64):
        s=CollectingSink(); sinks.append(s)
        e.submit(make_request("x"*(i+1), max_tokens=i+1, stream=i%2==0), s)
    for i,s in enumerate(sinks):
        s.wait()
        assert [*s.text.encode()]==[t-2 for t in solo_output(byte_tokens("x"*(i+1)),i+1)]
        assert s.num_output_tokens==i+1
