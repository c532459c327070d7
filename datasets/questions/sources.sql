-- sources: what became of the rows of each source
with final as (
    select source, benchmark, rows, quarantined, dropped, kept
    from sources
    order by source
)

select * from final
